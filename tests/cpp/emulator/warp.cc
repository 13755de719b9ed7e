#include "warp.h"

#include <stdio.h>
#include <stdlib.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "context.h"

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
#endif

namespace emulator {
namespace {

constexpr size_t kStack = 128 << 10;
constexpr unsigned kNoOrder = 1;  // a switch of fibers orders nothing

struct Fiber {
  Context context;
  std::unique_ptr<char[]> stack{new char[kStack]};
  bool started, done;
  uint64_t waits_for;         // the exchange that must be over before it goes on
  void* sanitizer = nullptr;  // what the sanitizer keeps of its stack
};

}  // namespace

// Two sets of slots: a lane may give to the next exchange before another has read this one.
struct Warp {
  std::vector<Fiber> fibers{kWarp};
  uint64_t slots[2][kWarp];
  const char* operation;
  uint64_t over;  // exchanges that all lanes have reached
  int arrived, live;
  int lane;
  bool paused;
  Thread thread;
  unsigned first_thread;
  const std::function<void()>* body;
  int device;
  char *before,
      *after;  // what the sanitizer takes for the ends of the kernel before and of this one
  Context scheduler;
  void* sanitizer;
  const void* scheduler_stack;
  size_t scheduler_stack_size;
};

namespace {

Warp* running = nullptr;

Warp& warp() { return *running; }

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
  Context::change(me.context, w.scheduler);
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
  __tsan_acquire(const_cast<std::function<void()>*>(w.body));  // the launch
  __tsan_acquire(w.before);
#endif
  (*w.body)();
#if defined(__SANITIZE_THREAD__)
  __tsan_release(w.after);
#endif
  w.fibers[w.lane].done = true;
  --w.live;
  to_scheduler(true);
}

CGX_UNSEEN void resume(int lane) {
  Warp& w = warp();
  Fiber& fiber = w.fibers[lane];
  w.lane = lane;
  w.thread.thread = w.first_thread + lane;
  if (!fiber.started) {
    fiber.started = true;
    fiber.context.start(fiber.stack.get(), kStack, enter);
  }
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&w.sanitizer, fiber.stack.get(), kStack);
#elif defined(__SANITIZE_THREAD__)
  w.sanitizer = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(fiber.sanitizer, kNoOrder);
#endif
  Context::change(w.scheduler, fiber.context);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(w.sanitizer, nullptr, nullptr);
#endif
}

[[noreturn]] void fail(const char* what, const char* detail) {
  fprintf(stderr, "emulator: %s: %s\n", what, detail);
  abort();
}

// Runs the warp until it pauses or ends. Returns whether it has ended.
CGX_UNSEEN bool run_warp(Warp* next) {
  running = next;
  Warp& w = *next;
  int order[kWarp];
  std::iota(order, order + kWarp, 0);
  while (w.live > 0) {
    std::shuffle(order, order + kWarp, random());
    bool moved = false;
    for (const int lane : order) {
      if (w.fibers[lane].done || w.fibers[lane].waits_for > w.over) continue;
      resume(lane);
      moved = true;
    }
    if (!moved) fail("lanes wait for lanes that have ended", w.operation);
    if (w.paused) break;
  }
  w.paused = false;
  return w.live == 0;
}

// Warps that have ended, by device. Recently used warps come last, because for the sanitizer, what
// a warp did before is ordered before what it does next.
std::deque<Warp*>& idle(int device) {
  static auto* const all = new std::map<int, std::deque<Warp*>>;
  std::deque<Warp*>& own = (*all)[device];
  while (own.size() < 4) own.push_back(new Warp);
  return own;
}

// What stands for the end of a kernel in the sanitizer: an address that is never reused.
char* new_end() {
  static auto* const all = new std::deque<char>;
  return &all->emplace_back();
}

// The end of a stream's last kernel.
char*& last_of(const void* stream) {
  static auto* const all = new std::map<const void*, char*>;
  char*& last = (*all)[stream];
  if (!last) last = new_end();
  return last;
}

struct Faults {
  const void *lost = nullptr, *presumed = nullptr;
  bool relaxed = false;
};
Faults faults;

// Who has stored a word last, and in which scope.
struct Store {
  int device;
  bool system;
};
std::map<const void*, Store>& stores_of_words() {
  static auto* const all = new std::map<const void*, Store>;
  return *all;
}

}  // namespace

Grid::Grid(unsigned blocks, unsigned threads, std::function<void()> body, const void* stream,
           int device)
    : blocks_(blocks),
      threads_(threads),
      body_(std::move(body)),
      stream_(stream),
      device_(device % 8),
      end_(new_end()) {
  if (threads % kWarp != 0) fail("only whole warps are emulated", "launch");
#if defined(__SANITIZE_THREAD__)
  __tsan_release(const_cast<std::function<void()>*>(&body_));
#endif
}

CGX_UNSEEN Warp* Grid::start() {
  const unsigned warps = threads_ / kWarp, first = started_ % warps * kWarp;
  std::deque<Warp*>& pool = idle(device_);
  Warp& w = *pool.front();
  pool.pop_front();
  w.thread = {first, started_ / warps, threads_, blocks_};
  w.first_thread = first;
  w.arrived = 0;
  w.over = 0;
  w.live = kWarp;
  w.paused = false;
  w.body = &body_;
  w.device = device_;
  w.before = last_of(stream_);
  w.after = end_;
  for (Fiber& fiber : w.fibers) {
    fiber.started = fiber.done = false;
    fiber.waits_for = 0;
#if defined(__SANITIZE_THREAD__)
    if (!fiber.sanitizer)
      fiber.sanitizer = __tsan_create_fiber(0);  // takes longer than most kernels
#else
    fiber.sanitizer = nullptr;
#endif
  }
  ++started_;
  return &w;
}

bool Grid::step() {
  const unsigned all = blocks_ * (threads_ / kWarp);
  // Now and then some warps get far before the others have a turn.
  for (uint64_t turns = random()() % 8 == 0 ? random()() % 64 : 1; ended_ < all;) {
    const size_t waiting = paused_.size() + (started_ < all);
    const size_t which = waiting > 1 ? random()() % waiting : 0;
    Warp* next;
    if (which < paused_.size()) {
      next = paused_[which];
      paused_.erase(paused_.begin() + which);
    } else {
      next = start();
    }
    if (run_warp(next)) {
      ++ended_;
      idle(device_).push_back(next);
    } else {
      paused_.push_back(next);
      if (turns-- <= 1) return false;
    }
  }
  last_of(stream_) = end_;
  return true;
}

void after_kernels_of(const void* stream) {
  (void)stream;
#if defined(__SANITIZE_THREAD__)
  __tsan_acquire(last_of(stream));
#endif
}

void before_kernels_of(const void* stream) {
  (void)stream;
#if defined(__SANITIZE_THREAD__)
  __tsan_release(last_of(stream));
#endif
}

CGX_UNSEEN void pause() {
  warp().paused = true;
  to_scheduler(false);
}

CGX_UNSEEN bool stores(const void* word) { return word != faults.lost; }

CGX_UNSEEN uint64_t loaded(const void* word, uint64_t value) {
  return word == faults.presumed ? ~uint64_t{0} : value;
}

void lose_stores_to(const void* word) { faults.lost = word; }

void presume(const void* word) { faults.presumed = word; }

void relax_stores(bool relax) { faults.relaxed = relax; }

CGX_UNSEEN bool relaxed() { return faults.relaxed; }

void note_store(const void* word, bool system) {
#if defined(__SANITIZE_THREAD__)
  (void)word, (void)system;
#else
  stores_of_words()[word] = {warp().device, system};
#endif
}

void check_load(const void* word, bool system) {
#if defined(__SANITIZE_THREAD__)
  (void)word, (void)system;
#else
  const auto found = stores_of_words().find(word);
  if (found == stores_of_words().end() || found->second.device == warp().device) return;
  if (!system || !found->second.system) fail("a word of another device", "an atomic of one device");
#endif
}

void forget_words() { stores_of_words().clear(); }

CGX_UNSEEN int64_t clock() {
  static int64_t ticks = 0;
  return ++ticks;
}

CGX_UNSEEN const Thread& current() { return warp().thread; }

CGX_UNSEEN int lane() { return warp().lane; }

CGX_UNSEEN const uint64_t* exchange(const char* operation, unsigned mask, uint64_t value) {
  Warp& w = warp();
  if (mask != 0xffffffffu) fail("only whole warps are emulated", operation);
  if (w.arrived > 0 && strcmp(operation, w.operation) != 0) {
    fail("lanes of a warp meet in different operations", operation);
  }
#if defined(__SANITIZE_THREAD__)
  const bool orders = strcmp(operation, "syncwarp") == 0;
  if (orders) __tsan_release(&w.arrived);
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
  if (orders) __tsan_acquire(&w.arrived);
#endif
  return w.slots[mine % 2];
}

void set_seed(uint64_t seed) { random().seed(seed); }

}  // namespace emulator
