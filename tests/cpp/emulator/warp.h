// Runs a kernel's source on the CPU: every CUDA thread of a warp is a fiber, and what a warp does
// together is where fibers take turns. Warps take turns where a thread pauses, as at a flag; a
// kernel that does not pause runs its warps one after the other.
//
// Build with -fsanitize=address to find accesses past a buffer's end, with -fsanitize=thread to
// find memory that two threads touch with nothing between them: only a warp's own operations,
// atomics and the order of a stream's kernels order threads.
#ifndef CGX_EMULATOR_WARP_H_
#define CGX_EMULATOR_WARP_H_

#include <stdint.h>
#include <string.h>

#include <functional>
#include <vector>

namespace emulator {

constexpr int kWarp = 32;

struct Thread {
  unsigned thread, block, threads, blocks;
};

// The CUDA thread that runs now.
const Thread& current();
int lane();

// Gives `value` to the warp and waits for it; afterwards `slots` holds what every lane gave.
// Ends the process when lanes of a warp meet in different operations.
const uint64_t* exchange(const char* operation, unsigned mask, uint64_t value);

// Lets other warps go on.
void pause();

template <typename T>
class Exchange {
 public:
  Exchange(const char* operation, unsigned mask, T value) {
    static_assert(sizeof(T) <= sizeof(uint64_t), "a register of a lane");
    uint64_t word = 0;
    memcpy(&word, &value, sizeof(T));
    slots_ = exchange(operation, mask, word);
  }
  T operator[](int lane) const {
    T value;
    memcpy(&value, slots_ + lane, sizeof(T));
    return value;
  }

 private:
  const uint64_t* slots_;
};

struct Warp;

// A kernel's launch: `body` as every thread of a grid. set_seed() says in what order lanes and
// warps go on. The sanitizer takes launches of one `stream` to be in order.
class Grid {
 public:
  Grid(unsigned blocks, unsigned threads, std::function<void()> body, const void* stream,
       int device);
  // Goes on until a thread pauses; whether the grid is over.
  bool step();

 private:
  Warp* start();

  const unsigned blocks_, threads_;
  const std::function<void()> body_;
  const void* const stream_;
  const int device_;
  char* const end_;
  unsigned started_ = 0, ended_ = 0;
  std::vector<Warp*> paused_;
};

void set_seed(uint64_t seed);

// What is done on the host between a stream's kernels comes after those before it, and before those
// after it: call these around it.
void after_kernels_of(const void* stream);
void before_kernels_of(const void* stream);

// --- atomics, which tests may make fail

// The host's view of an atomic store and load of a whole word: whether the store happens, and what
// to make of the loaded value.
bool stores(const void* word);
uint64_t loaded(const void* word, uint64_t value);

// Stores to that word get lost; whoever loads this one finds the largest number (null: none).
void lose_stores_to(const void* word);
void presume(const void* word);
// Stores release nothing, so that the thread sanitizer has to complain.
void relax_stores(bool relax);
bool relaxed();

// Ticks of a clock that every reading moves on.
int64_t clock();

}  // namespace emulator

#endif  // CGX_EMULATOR_WARP_H_
