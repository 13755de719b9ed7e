// Runs a kernel's source on the CPU: every CUDA thread of a warp is a fiber, and what a warp does
// together is where fibers take turns. Threads of different warps never meet, as in the kernels.
//
// Build with -fsanitize=address to find accesses past a buffer's end, with -fsanitize=thread to
// find memory that two threads touch with nothing between them: only a warp's own operations
// order its threads.
#ifndef CGX_EMULATOR_WARP_H_
#define CGX_EMULATOR_WARP_H_

#include <stdint.h>
#include <string.h>

#include <functional>

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

// Runs `body` as every thread of a grid. The order of a warp's lanes follows set_seed().
void run_grid(unsigned blocks, unsigned threads, const std::function<void()>& body);
void set_seed(uint64_t seed);

}  // namespace emulator

#endif  // CGX_EMULATOR_WARP_H_
