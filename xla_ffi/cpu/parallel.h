// Splits work over a thread pool that the caller may itself be a thread of.
#ifndef CGX_CPU_PARALLEL_H_
#define CGX_CPU_PARALLEL_H_

#include <stdint.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <numeric>
#include <utility>
#include <vector>

#include "cpu/kernels.h"

namespace cgx {

constexpr int64_t kTaskValues = 1 << 16;  // about 10 us of work, far above the cost of a hand-over

// The largest number of workers that parallel_for uses.
template <typename Pool>
int64_t workers(const Pool& pool, int64_t tasks) {
  return std::max<int64_t>(1, std::min<int64_t>(tasks, pool.num_threads()));
}

// Room for `values` values for each of `workers`. Each worker's room starts at a cache line.
class Scratch {
 public:
  Scratch(int64_t workers, int64_t values)
      : stride_((values + kLine - 1) / kLine * kLine), values_(workers * stride_ + kLine) {}
  float* of(int64_t worker) {
    const auto start = reinterpret_cast<uintptr_t>(values_.data()) / sizeof(float);
    return values_.data() + (kLine - start % kLine) % kLine + worker * stride_;
  }

 private:
  static constexpr int64_t kLine = 16;  // values
  int64_t stride_;
  std::vector<float> values_;
};

// Calls f(task, worker) once for each task in [0, tasks), with worker in [0, workers(pool, tasks)).
// If tasks throw, it throws the first exception, after all tasks are over.
//
// The caller works too and waits only for tasks that have started, so the pool cannot deadlock,
// even if a helper is never scheduled. A late helper finds the counter exhausted and touches
// nothing else.
template <typename Pool, typename F>
void parallel_for(Pool& pool, int64_t tasks, F&& f) {
  struct State {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> workers{0};
    int64_t done = 0;
    std::mutex mutex;
    std::condition_variable all_done;
    std::exception_ptr error;  // the first
  };
  const auto state = std::make_shared<State>();
  const auto work = [state, tasks, &f] {
    int64_t worker = -1, finished = 0;
    for (int64_t task; (task = state->next.fetch_add(1)) < tasks; ++finished) {
      if (worker < 0) worker = state->workers.fetch_add(1);
      const ScopedArithmetic ieee(Subnormals::kKept);
      try {
        f(task, worker);
      } catch (...) {
        const std::lock_guard<std::mutex> lock(state->mutex);
        if (!state->error) state->error = std::current_exception();
      }
    }
    if (finished == 0) return;
    const std::lock_guard<std::mutex> lock(state->mutex);
    if ((state->done += finished) == tasks) state->all_done.notify_all();
  };
  try {
    for (int64_t helper = 1; helper < workers(pool, tasks); ++helper)
      pool.Schedule([work] { work(); });
  } catch (...) {  // fewer helpers, the same work
  }
  work();
  std::unique_lock<std::mutex> lock(state->mutex);
  state->all_done.wait(lock, [&] { return state->done == tasks; });
  // A late helper may free the state, but not while the caller handles what it took from there.
  if (const auto error = std::exchange(state->error, nullptr)) std::rethrow_exception(error);
}

// The number of tasks into which to split a range that holds `values` values.
inline int64_t pieces(int64_t values) { return std::max<int64_t>(1, values / kTaskValues); }

// Cuts the byte range [from, to) of each of `batches` buffers into `count` pieces and calls
// f(batch, piece_from, piece_to, worker) for each.
template <typename Pool, typename F>
void split_range(Pool& pool, int64_t batches, int64_t from, int64_t to, int64_t count, F&& f) {
  parallel_for(pool, batches * count, [&](int64_t task, int64_t worker) {
    const int64_t piece = task % count;
    f(task / count, from + chunk_cut(piece, to - from, count),
      from + chunk_cut(piece + 1, to - from, count), worker);
  });
}

// Cuts each of `batches` arrays of `values` values into pieces of whole runs of `run` values,
// except that the last run may be shorter. Calls f(batch, from, to) for each piece.
template <typename Pool, typename F>
void split_runs(Pool& pool, int64_t batches, int64_t values, int64_t run, F&& f) {
  const int64_t runs = (values + run - 1) / run;
  const int64_t count = std::min(pieces(values), std::max<int64_t>(runs, 1));
  parallel_for(pool, batches * count, [&](int64_t task, int64_t) {
    const int64_t piece = task % count;
    f(task / count, runs * piece / count * run, std::min(values, runs * (piece + 1) / count * run));
  });
}

// Encodes `batch` arrays; call(b) is the BucketsCall of one of them.
template <typename Pool, typename F>
void encode_buckets(Pool& pool, int64_t batch, F&& call) {
  const BucketsCall first = call(0);
  const int64_t whole = first.width == 0 ? 5 : 8;  // codes that make whole bytes
  const int64_t run = std::lcm(first.bucket_size, whole);
  split_runs(pool, batch, first.n, run, [&](int64_t b, int64_t from, int64_t to) {
    current_kernels().codes.encode_buckets(call(b), from, to);
  });
}

}  // namespace cgx

#endif  // CGX_CPU_PARALLEL_H_
