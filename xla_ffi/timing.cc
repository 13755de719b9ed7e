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
  const LeavesOut out{timed.out ? &timed.out : nullptr, &timed.dtype};
  int64_t from = 0, to = layout.total_bytes(), count = pieces(owned.values());
  const auto split = [&](auto&& f) {
    return seconds([&] {
      split_range(
          pool, 1, from, to, count,
          [&](int64_t, int64_t first, int64_t last, int64_t worker) { f(first, last, worker); });
    });
  };
  if (kernel == "encode") {
    const EncodeCall call{layout, in, out, timed.key, timed.rank, timed.payload};
    return split([&](int64_t f, int64_t l, int64_t) { kernels.encode(call, f, l); });
  }
  if (kernel == "decode") {
    const DecodeCall call{layout, timed.payload, out};
    return split([&](int64_t f, int64_t l, int64_t) { kernels.decode(call, f, l); });
  }
  if (kernel == "accumulate") {
    const AccumulateCall call{layout,        in, timed.payload, timed.world, timed.rank,
                              timed.divisor, out};
    return split([&](int64_t f, int64_t l, int64_t) { kernels.accumulate(call, f, l); });
  }
  if (kernel == "reduce") {
    from = layout.begin[timed.rank];
    to = layout.begin[timed.rank + 1];
    count = pieces(owned.values() / layout.world);
    std::vector<float> scratch(threads * owned.longest_bucket());
    const ReduceCall call{layout,        in,          timed.key,      timed.rank, timed.payload,
                          timed.divisor, timed.chunk, scratch.data(), {}};
    return split([&](int64_t f, int64_t l, int64_t worker) {
      ReduceCall own = call;
      own.scratch += worker * owned.longest_bucket();
      kernels.reduce(own, f, l);
    });
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
