// CUDA streams, events and NCCL messages on the CPU. A stream is a queue, and one scheduler runs
// the head of a queue that a seed chooses. So a missing wait shows as a wrong result, and a wrong
// order of messages as a deadlock. Threads may share the emulator: one lock guards everything,
// including kernels.
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

// A step of a stream. Returns false if it has to be tried again later.
using Operation = std::function<bool()>;

struct Stream;

// A recorded sequence of operations and kernels. Each can put itself on a stream any number of
// times.
using Graph = std::vector<std::function<void(Stream*)>>;

struct Stream {
  int device;
  std::deque<Operation> queue;
  Graph* captured = nullptr;  // receives operations instead of the queue during a capture
};

struct Event {
  std::shared_ptr<bool> reached;  // only of the last record; waits hold that of their own record
  std::chrono::steady_clock::time_point when;  // when it was last reached
};

// Puts an operation or a kernel on a stream; the null stream runs it at once. A kernel runs `body`
// as every thread of a grid.
void submit(Stream* stream, Operation operation);
void submit_kernel(Stream* stream, unsigned blocks, unsigned threads, std::function<void()> body);

Stream* create_stream();  // of the current device
void record(Event* event, Stream* stream);
void wait(Stream* stream, Event* event);
void begin_capture(Stream* stream);
Graph* end_capture(Stream* stream);

// The device that is current in this thread.
void set_device(int device);
int device();
// How many multiprocessors every device has: 60 after reset(). Each runs one block of a kernel.
void set_processors(int processors);
int processors();

// What the runtime creates and loads. On a real device each of these may wait for all streams, and
// messages on the streams may wait for other ranks of this process. made() is how many there have
// been since reset(). NCCL creates things too, at the first message between two ranks. A launch
// loads the kernel unless the current device has it.
Stream* make_stream();
Event* make_event();
void* make_memory(size_t bytes);
void free_memory(void* memory);
void load(const void* kernel);
int64_t made();
// Loads the kernel of a launch and counts it. Since reset(): how many there have been, how many of
// them were cooperative, and the most blocks of one.
void count_launch(const void* kernel, int blocks, bool cooperative);
int64_t launches();
int64_t cooperative_launches();
int most_blocks();

// Forgets all streams, events, messages and kernels.
void reset();
// waits() is how many waits have been put on streams since reset(); leave_out() names one of them
// to leave out (-1: none).
int64_t waits();
void leave_out(int64_t wait);

// Runs everything that has been put on streams. Returns false on a deadlock, when nothing can
// continue. Odd seeds starve streams as long as others can continue; even seeds choose evenly.
// Kernels of several streams that wait for each other take turns.
bool run_streams(uint64_t seed);
// Runs what it can. Returns whether everything on the streams of the current device has run.
bool synchronize();
// The same of one stream. It may wait for what another thread puts on its streams later.
bool query(Stream* stream);

// Makes `count` of the CUDA calls that the library makes from now on fail, from number `call` on
// (-1: none). cuda_fails() counts a call and returns whether it fails.
void fail_cuda_at(int64_t call, int64_t count = 1);
bool cuda_fails();

// NCCL's point-to-point calls between ranks of this process. Results are ncclResult_t values. send
// and recv take only pointers to multiples of 16. Each thread has its own group.
struct Comm {
  int rank, world;
  int64_t number = 0;     // of the communicator, the same on all ranks
  int64_t resources = 0;  // the communicator whose connections it uses
  bool share = true;      // whether communicators split from it use them too
  int blocks = 32;        // thread blocks of its messages, at most
  int64_t splits = 0;
  uint64_t operators = 0;  // a bit for each that exists
};
int group_start();
int group_end();
void drop_group();  // closes this thread's group, like a group_end that fails
bool in_group();    // whether this thread's group is open
int send(const void* data, size_t count, int peer, const Comm* comm, Stream* stream);
int recv(void* data, size_t count, int peer, const Comm* comm, Stream* stream);
// Splits off a communicator of the same ranks, which lives until reset(). `share` and `blocks` are
// those of the new communicator. `from` must have no message on a stream.
int split(Comm* from, bool share, int blocks, Comm** made);
// Ends all messages of a communicator, as ncclCommAbort does, so that streams continue without
// them. Messages of communicators that were split from it stay.
void abort_messages(const Comm& comm);
// Makes one of the calls of group_start, send, recv, group_end and split from now on fail, by its
// number from 0 on (-1: none).
void fail_at(int64_t call);
// How many communicators, and how many connections, have had a message on a stream since reset() or
// forget_used().
void forget_used();
int64_t used();
int64_t connections();

}  // namespace emulator

#endif  // CGX_EMULATOR_STREAMS_H_
