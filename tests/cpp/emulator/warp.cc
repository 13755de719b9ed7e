#include "warp.h"

#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}
#define CGX_UNSEEN __attribute__((no_sanitize("thread")))
#else
#define CGX_UNSEEN
#endif

namespace emulator {
namespace {

constexpr size_t kStack = 128 << 10;
constexpr unsigned kNoOrder = 1;  // a switch of fibers orders nothing

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStack]};
  bool started, done;
  uint64_t waits_for;  // the exchange that must be over before it goes on
  void* sanitizer;     // what the sanitizer keeps of its stack
};

// Two sets of slots: a lane may give to the next exchange before another has read this one.
struct Warp {
  std::vector<Fiber> fibers{kWarp};
  uint64_t slots[2][kWarp];
  const char* operation;
  uint64_t over;  // exchanges that all lanes have come to
  int arrived, live;
  int lane;
  Thread thread;
  const std::function<void()>* body;
  ucontext_t scheduler;
  void* sanitizer;
  const void* scheduler_stack;
  size_t scheduler_stack_size;
};

Warp& warp() {
  static Warp* const w = new Warp;
  return *w;
}

std::mt19937_64& random() {
  static std::mt19937_64 engine(1);
  return engine;
}

CGX_UNSEEN void to_scheduler(bool last) {
  Warp& w = warp();
  Fiber& me = w.fibers[w.lane];
  (void)last;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(last ? nullptr : &me.sanitizer, w.scheduler_stack,
                                 w.scheduler_stack_size);
#elif defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(w.sanitizer, kNoOrder);
#endif
  swapcontext(&me.context, &w.scheduler);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(me.sanitizer, &w.scheduler_stack, &w.scheduler_stack_size);
#endif
}

CGX_UNSEEN void enter() {
  Warp& w = warp();
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &w.scheduler_stack, &w.scheduler_stack_size);
#endif
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(&w.body);
#endif
  (*w.body)();
#if defined(__SANITIZE_THREAD__)
  __tsan_release(&w.live);
#endif
  w.fibers[w.lane].done = true;
  --w.live;
  to_scheduler(true);
}

CGX_UNSEEN void resume(int lane, unsigned first_thread) {
  Warp& w = warp();
  Fiber& fiber = w.fibers[lane];
  w.lane = lane;
  w.thread.thread = first_thread + lane;
  if (!fiber.started) {
    fiber.started = true;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStack;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
  }
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&w.sanitizer, fiber.stack.get(), kStack);
#elif defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(fiber.sanitizer, kNoOrder);
#endif
  swapcontext(&w.scheduler, &fiber.context);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(w.sanitizer, nullptr, nullptr);
#endif
}

[[noreturn]] void fail(const char* what, const char* detail) {
  fprintf(stderr, "emulator: %s: %s\n", what, detail);
  abort();
}

CGX_UNSEEN void run_warp(unsigned first_thread) {
  Warp& w = warp();
  w.arrived = 0;
  w.over = 0;
  w.live = kWarp;
  for (int lane = 0; lane < kWarp; ++lane) {
    Fiber& fiber = w.fibers[lane];
    fiber.started = fiber.done = false;
    fiber.waits_for = 0;
    fiber.sanitizer = nullptr;
#if defined(__SANITIZE_THREAD__)
    // One for each thread of a block, made once: making them takes longer than most kernels.
    static std::vector<void*> sanitizers;
    while (sanitizers.size() <= first_thread + lane) {
      sanitizers.push_back(__tsan_create_fiber(0));
    }
    fiber.sanitizer = sanitizers[first_thread + lane];
#endif
  }
#if defined(__SANITIZE_THREAD__)
  w.sanitizer = __tsan_get_current_fiber();
  __tsan_release(&w.body);
#endif
  int order[kWarp];
  std::iota(order, order + kWarp, 0);
  while (w.live > 0) {
    std::shuffle(order, order + kWarp, random());
    bool moved = false;
    for (const int lane : order) {
      if (w.fibers[lane].done || w.fibers[lane].waits_for > w.over) continue;
      resume(lane, first_thread);
      moved = true;
    }
    if (!moved) fail("lanes wait for lanes that have ended", w.operation);
  }
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(&w.live);
#endif
}

}  // namespace

CGX_UNSEEN const Thread& current() { return warp().thread; }

CGX_UNSEEN int lane() { return warp().lane; }

CGX_UNSEEN const uint64_t* exchange(const char* operation, unsigned mask, uint64_t value) {
  Warp& w = warp();
  if (mask != 0xffffffffu) fail("only whole warps are emulated", operation);
  if (w.arrived > 0 && strcmp(operation, w.operation) != 0) {
    fail("lanes of a warp meet in different operations", operation);
  }
#if defined(__SANITIZE_THREAD__)
  __tsan_release(&w.arrived);
#endif
  const uint64_t mine = w.over;
  w.operation = operation;
  w.slots[mine % 2][w.lane] = value;
  if (++w.arrived == kWarp) {
    w.arrived = 0;
    ++w.over;
  } else {
    w.fibers[w.lane].waits_for = mine + 1;
    to_scheduler(false);
  }
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(&w.arrived);
#endif
  return w.slots[mine % 2];
}

void run_grid(unsigned blocks, unsigned threads, const std::function<void()>& body) {
  Warp& w = warp();
  if (threads % kWarp != 0) fail("only whole warps are emulated", "launch");
  w.body = &body;
  for (unsigned block = 0; block < blocks; ++block) {
    for (unsigned first = 0; first < threads; first += kWarp) {
      w.thread = {first, block, threads, blocks};
      run_warp(first);
    }
  }
}

void set_seed(uint64_t seed) { random().seed(seed); }

}  // namespace emulator
