// CUDA streams, events and NCCL messages on the CPU: a stream is a queue, and one scheduler runs
// the head of a queue chosen by a seed, so that a missing wait shows as a wrong result and a wrong
// order of messages as a deadlock. Threads may share it: one lock guards all, kernels included.
#ifndef CGX_EMULATOR_STREAMS_H_
#define CGX_EMULATOR_STREAMS_H_

#include <stddef.h>
#include <stdint.h>

#include <chrono>
#include <deque>
#include <functional>
#include <vector>

namespace emulator {

// A step of a stream; false: not yet.
using Operation = std::function<bool()>;

struct Stream;

// A recorded sequence of operations and kernels: each puts itself on a stream, as often as wanted.
using Graph = std::vector<std::function<void(Stream*)>>;

struct Stream {
  int device;
  std::deque<Operation> queue;
  Graph* captured = nullptr;  // what goes there in place of the queue
};

struct Event {
  uint64_t recorded = 0, reached = 0;
  std::chrono::steady_clock::time_point when;  // it was reached last
};

// Puts an operation, or a kernel, `body` as every thread of a grid, on a stream; the null stream
// runs it at once.
void submit(Stream* stream, Operation operation);
void submit_kernel(Stream* stream, unsigned blocks, unsigned threads, std::function<void()> body);

Stream* create_stream();  // of the current device
Event* create_event();
void record(Event* event, Stream* stream);
void wait(Stream* stream, Event* event);
void begin_capture(Stream* stream);
Graph* end_capture(Stream* stream);

// The device that is current in this thread.
void set_device(int device);
int device();

// What the runtime makes and loads. On a device each may wait for all streams, and messages on them
// for other ranks of this process: late() is how many came after NCCL's first call since reset(). A
// kernel that is launched is loaded, unless the current device has it.
Stream* make_stream();
Event* make_event();
void load(const void* kernel);
int64_t late();
// Loads the kernel of a launch and counts it; how many there have been since reset().
void count_launch(const void* kernel);
int64_t launches();

// Forgets all streams, events, messages and kernels.
void reset();
// How many waits have been put on streams since reset(), and the one of them to leave out (-1:
// none).
int64_t waits();
void leave_out(int64_t wait);

// Runs everything that has been put on streams; false when nothing can go on (a deadlock). Odd
// seeds starve streams for as long as others can go on, even ones choose evenly. Kernels of several
// streams that wait for each other take turns.
bool run_streams(uint64_t seed);

// NCCL's point-to-point calls between ranks that are this process's: results are ncclResult_t's.
// send and recv take pointers to multiples of 16 only. fail_at counts calls of group_start, send,
// recv and group_end; that one fails (-1: none).
struct Comm {
  int rank, world;
};
int group_start();
int group_end();
int send(const void* data, size_t count, int peer, const Comm* comm, Stream* stream);
int recv(void* data, size_t count, int peer, const Comm* comm, Stream* stream);
void fail_at(int64_t call);

}  // namespace emulator

#endif  // CGX_EMULATOR_STREAMS_H_
