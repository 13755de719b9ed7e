// CUDA streams, events and NCCL messages on the CPU: a stream is a queue, and one scheduler runs
// the head of a queue chosen by a seed, so that a missing wait shows as a wrong result and a wrong
// order of messages as a deadlock.
#ifndef CGX_EMULATOR_STREAMS_H_
#define CGX_EMULATOR_STREAMS_H_

#include <stddef.h>
#include <stdint.h>

#include <deque>
#include <functional>
#include <memory>

namespace emulator {

class Grid;

// A step of a stream; false: not yet.
using Operation = std::function<bool()>;

struct Stream {
  int device;
  std::deque<Operation> queue;
};

struct Event {
  uint64_t recorded = 0, reached = 0;
};

// Puts an operation, or a kernel, on a stream; the null stream runs it at once.
void submit(Stream* stream, Operation operation);
void submit_kernel(Stream* stream, std::shared_ptr<Grid> grid);

Stream* create_stream();  // of the current device
Event* create_event();
void record(Event* event, Stream* stream);
void wait(Stream* stream, Event* event);

// The device that is current.
void set_device(int device);
int device();

// What the runtime makes and loads. On a device each may wait for all streams, and messages on them
// for other ranks of this process: late() is how many came after NCCL's first call since reset(). A
// kernel that is launched is loaded, unless the current device has it.
Stream* make_stream();
Event* make_event();
void load(const void* kernel);
int64_t late();

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
