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
#include <memory>
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
  std::shared_ptr<bool> reached;  // of the last record alone: waits hold that of theirs
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
// for other ranks of this process: late() is how many came after the first message since reset(). A
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
// send and recv take pointers to multiples of 16 only. A thread has a group of its own. fail_at
// counts calls of group_start, send, recv, group_end and split; that one fails (-1: none).
struct Comm {
  int rank, world;
  int64_t number = 0;     // of the communicator, which all ranks have
  int64_t resources = 0;  // the communicator whose connections it uses
  bool share = true;      // whether what is split from it uses them too
  int64_t splits = 0, marks = 0;
};
int group_start();
int group_end();
void drop_group();  // closes this thread's group as a group_end that fails does
int send(const void* data, size_t count, int peer, const Comm* comm, Stream* stream);
int recv(void* data, size_t count, int peer, const Comm* comm, Stream* stream);
// A communicator of the same ranks, until reset(). `share` is that of the new one.
int split(Comm* from, bool share, Comm** made);
// Ends all messages of a communicator, as ncclCommAbort does: streams go on without them. Those of
// communicators that were split from it stay.
void abort_messages(const Comm& comm);
void fail_at(int64_t call);
// How many communicators have had a message on a stream since reset(), and how many connections.
int64_t used();
int64_t connections();

}  // namespace emulator

#endif  // CGX_EMULATOR_STREAMS_H_
