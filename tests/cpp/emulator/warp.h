// Runs a kernel's source on the CPU. Every CUDA thread of a warp is a fiber, and fibers take turns
// at warp-wide operations. Warps take turns where a thread pauses, for example at a flag. A kernel
// that does not pause runs its warps one after the other.
//
// Build with -fsanitize=address to find accesses past a buffer's end. Build with -fsanitize=thread
// to find unordered accesses of two threads to the same memory: only __syncwarp, atomics and the
// order of a stream's kernels order threads. Votes and shuffles do not.
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

// Gives `value` to the warp and waits for all lanes. Returns the values of all lanes. Ends the
// process if lanes of a warp meet in different operations.
const uint64_t* exchange(const char* operation, unsigned mask, uint64_t value);

// Lets other warps continue.
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

// A kernel's launch: runs `body` as every thread of a grid. The seed of set_seed() chooses the
// order of lanes and warps. For the sanitizer, launches of one `stream` are in order.
class Grid {
 public:
  Grid(unsigned blocks, unsigned threads, std::function<void()> body, const void* stream,
       int device);
  // Runs until a thread pauses. Returns whether the grid is finished.
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

// Call these around work that the host does between a stream's kernels: the work then comes after
// the earlier kernels and before the later ones.
void after_kernels_of(const void* stream);
void before_kernels_of(const void* stream);

// --- atomics, which tests may make fail

// How an atomic store and load of a whole word behave: whether the store happens, and the value
// that the load returns.
bool stores(const void* word);
uint64_t loaded(const void* word, uint64_t value);

// Stores to the word of lose_stores_to get lost. Loads of the word of presume return the largest
// number. Null: no word.
void lose_stores_to(const void* word);
void presume(const void* word);
// Makes stores release nothing, so that the thread sanitizer must complain.
void relax_stores(bool relax);
bool relaxed();

// Atomics of system scope reach other devices, those of device scope do not. check_load ends the
// process if another device has stored the word and one of both atomics has device scope. Not under
// the thread sanitizer, which would see the notes themselves.
void note_store(const void* word, bool system);
void check_load(const void* word, bool system);
void forget_words();

// Ticks of a clock that advances with every reading.
int64_t clock();

}  // namespace emulator

#endif  // CGX_EMULATOR_WARP_H_
