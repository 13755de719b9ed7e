#include "timing.h"

#include <string.h>

#include <chrono>

#include "parallel.h"
#include "worker_pool.h"

namespace cgx {
namespace {

template <typename F>
double seconds(F&& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

double time_kernel(const std::string& kernel, const Timed& timed, const OwnedLayout& owned,
                   int64_t threads) {
  WorkerPool pool(threads);
  const KernelTable& kernels = current_kernels();
  const Layout layout = owned.view();
  const LeavesIn in{&timed.in, &timed.dtype};
  const LeafUnits* const units = timed.units.num_rows ? &timed.units : nullptr;
  const LeavesOut out{timed.out ? &timed.out : nullptr, &timed.dtype};
  Scratch scratch(threads, owned.longest_bucket());
  int64_t from = 0, to = layout.total_bytes(), count = pieces(owned.values());
  const auto split = [&](auto&& f) {
    return seconds([&] {
      split_range(
          pool, 1, from, to, count,
          [&](int64_t, int64_t first, int64_t last, int64_t worker) { f(first, last, worker); });
    });
  };
  const auto timed_calls = [&](auto call, void (*run)(const decltype(call)&, int64_t, int64_t)) {
    return split([&](int64_t first, int64_t last, int64_t worker) {
      auto own = call;
      own.scratch = scratch.of(worker);
      run(own, first, last);
    });
  };
  if (kernel == "encode") {
    return timed_calls(
        EncodeCall{layout, in, out, timed.key, timed.rank, timed.payload, nullptr, units},
        kernels.encode);
  }
  if (kernel == "decode") {
    return timed_calls(DecodeCall{layout, timed.payload, out, nullptr, units}, kernels.decode);
  }
  if (kernel == "accumulate") {
    return timed_calls(AccumulateCall{layout, in, timed.payload, timed.world, timed.rank,
                                      timed.divisor, out, nullptr},
                       kernels.accumulate);
  }
  if (kernel == "reduce") {
    from = layout.begin[timed.rank];
    to = layout.begin[timed.rank + 1];
    count = pieces(owned.values() / layout.world);
    return timed_calls(ReduceCall{layout,
                                  in,
                                  timed.key,
                                  timed.rank,
                                  timed.payload,
                                  timed.divisor,
                                  timed.chunk,
                                  nullptr,
                                  {},
                                  units},
                       kernels.reduce);
  }
  return -1.0;
}

double time_copy(void* to, const void* from, int64_t bytes, int64_t threads) {
  WorkerPool pool(threads);
  return seconds([&] {
    split_range(pool, 1, 0, bytes, threads, [&](int64_t, int64_t first, int64_t last, int64_t) {
      memcpy(static_cast<char*>(to) + first, static_cast<const char*>(from) + first, last - first);
    });
  });
}

}  // namespace cgx
