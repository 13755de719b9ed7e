// Times one CPU kernel on buffers of the caller, without XLA around it: a C library of its own for
// benchmarks/codec.py, which loads it by kernel_timing.py. The package does not have it.
#include <string.h>

#include <chrono>
#include <exception>
#include <string>

#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/select.h"
#include "cpu/worker_pool.h"
#include "format/layout.h"

#define CGX_EXPORT extern "C" __attribute__((visibility("default")))

// An array of NumPy's; `bytes` is 0 for none.
struct Array {
  void* data;
  int64_t bytes;
};

// A call on one leaf. `payload` is u8[world, chunk_bytes]; `chunk` is reduce's result, `out` the
// leaf that decode and accumulate write or (encode) the residual. kernel_timing.py repeats it.
struct Timed {
  const char* kernel;  // encode, reduce, decode, accumulate
  int64_t dtype;       // a cgx::DType
  int64_t bits, bucket_size, rounding, rotation;
  int64_t world, rank, threads;
  double divisor;
  Array leaf, out, payload, chunk;
  Array units;  // of the leaf, float32[2, rows + columns]
  int64_t columns;
};

// A call on one array of a code beside the wire format's: its integers are those of the code.
struct TimedCode {
  const char* code;
  int64_t threads, keep, bucket_size, levels;
  Array values, out, taken;  // `taken` where values are selected
};

namespace cgx {
namespace {

constexpr int64_t kMostThreads = 1024;
const char* const kFewerThreads = "threads must be in [1, 1024]";

constexpr uint32_t kKey[2] = {1, 2};

template <typename F>
double seconds_of(F&& f) {
  const auto start = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// What is wrong with the call; "" when nothing is. The kernels trust their pointers, so all sizes
// are checked here.
std::string time_kernel(const Timed& timed, double* seconds) {
  if (timed.dtype < 0 || timed.dtype > 2) return "dtype must be 0, 1 or 2";
  const DType dtype = static_cast<DType>(timed.dtype);
  const std::string kernel = timed.kernel;
  const bool accumulate = kernel == "accumulate", reduce = kernel == "reduce";
  const int64_t size = timed.leaf.bytes / item_size(dtype), world = timed.world;
  const int64_t rank = timed.rank, threads = timed.threads;
  if (world < 1 || world > kMaxWorld) return "world must be in [1, 2^20]";
  if (threads < 1 || threads > kMostThreads) return kFewerThreads;
  const int64_t columns = timed.columns, factors = timed.units.bytes / (2 * sizeof(float));
  const bool fits = columns > 0 && columns < factors && size % columns == 0;
  const int64_t rows = fits ? size / columns : 0;
  if (factors > 0 && (!fits || rows != factors - columns)) return "units do not fit the leaf";
  const float* const numbers = static_cast<const float*>(timed.units.data);
  LeafUnits own;
  if (factors > 0) own = {numbers, numbers + rows, columns, factors};
  const LeafUnits* const units = factors > 0 ? &own : nullptr;
  OwnedLayout owned;
  const std::string error =
      owned.build({{size, timed.bits, timed.bucket_size, timed.rounding, 0, timed.rotation}},
                  accumulate ? 1 : world);
  if (!error.empty()) return error;
  const Layout layout = owned.view();
  const int64_t row = layout.chunk_bytes;
  const bool writes = kernel == "decode" || accumulate;
  if (timed.payload.bytes != world * row || (reduce && timed.chunk.bytes != row) ||
      (timed.out.bytes != timed.leaf.bytes && (timed.out.bytes != 0 || writes)) ||
      (rank < 0 && reduce) || rank >= world) {
    return "buffer sizes or rank do not fit the layout";
  }

  WorkerPool pool(threads);  // started before the clock
  const KernelTable& kernels = current_kernels();
  const void* const leaf = timed.leaf.data;
  void* const written = timed.out.data;
  uint8_t* const payload = static_cast<uint8_t*>(timed.payload.data);
  const float divisor = static_cast<float>(timed.divisor);
  const LeavesIn in{&leaf, &dtype};
  const LeavesOut out{timed.out.bytes ? &written : nullptr, &dtype};
  Scratch scratch(threads, owned.scratch_values());
  int64_t from = 0, to = layout.total_bytes(), count = pieces(layout.values);
  const auto time_calls = [&](auto call, void (*run)(const decltype(call)&, int64_t, int64_t)) {
    *seconds = seconds_of([&] {
      split_range(pool, 1, from, to, count,
                  [&](int64_t, int64_t first, int64_t last, int64_t worker) {
                    auto own = call;
                    own.scratch = scratch.of(worker);
                    run(own, first, last);
                  });
    });
    return "";
  };
  if (kernel == "encode") {
    return time_calls(EncodeCall{layout, in, out, kKey, rank, payload, nullptr, units},
                      kernels.encode);
  }
  if (kernel == "decode") {
    return time_calls(DecodeCall{layout, payload, out, nullptr, units}, kernels.decode);
  }
  if (accumulate) {
    return time_calls(AccumulateCall{layout, in, payload, world, rank, divisor, out, nullptr},
                      kernels.accumulate);
  }
  if (reduce) {
    from = layout.begin[rank];
    to = layout.begin[rank + 1];
    count = pieces(layout.values / layout.world);
    uint8_t* const chunk = static_cast<uint8_t*>(timed.chunk.data);
    return time_calls(
        ReduceCall{layout, in, kKey, rank, payload, divisor, chunk, nullptr, {}, units},
        kernels.reduce);
  }
  return "there is no kernel " + kernel;
}

std::string time_code(const TimedCode& timed, double* seconds) {
  const std::string code = timed.code;
  const CodeKernels& codes = current_kernels().codes;
  if (timed.threads < 1 || timed.threads > kMostThreads) return kFewerThreads;
  WorkerPool pool(timed.threads);
  const float* const x = static_cast<const float*>(timed.values.data);
  float* const y = static_cast<float*>(timed.values.data);
  uint8_t* const out = static_cast<uint8_t*>(timed.out.data);
  int32_t* const at = static_cast<int32_t*>(timed.out.data);
  float* const taken = static_cast<float*>(timed.taken.data);
  const int64_t n = timed.values.bytes / sizeof(float), keep = timed.keep;
  const auto fits = [&](int64_t bytes) { return timed.out.bytes == bytes; };
  const auto time_runs = [&](int64_t run, auto&& f) {
    *seconds = seconds_of([&] {
      split_runs(pool, 1, n, run, [&](int64_t, int64_t from, int64_t to) { f(from, to); });
    });
    return "";
  };
  if (code == "signs" && fits((n + 7) / 8)) {
    return time_runs(8, [&](int64_t from, int64_t to) {
      codes.pack_signs(x + from, to - from, out + from / 8);
    });
  }
  if (code == "decode signs" && fits((n + 7) / 8)) {
    return time_runs(8, [&](int64_t from, int64_t to) {
      codes.unpack_signs(out + from / 8, to - from, n > kNontemporalValues, y + from);
    });
  }
  const bool selected = keep > 0 && keep <= n && fits(keep * 4) && timed.taken.bytes == keep * 4;
  if (code == "largest" && selected) {
    *seconds = seconds_of([&] { largest(pool, x, n, keep, at, taken); });
    return "";
  }
  if (code == "above a sampled threshold" && selected) {
    const int32_t places[2] = {static_cast<int32_t>(n / 3), static_cast<int32_t>(n / 2)};
    constexpr int64_t kStride = 400;
    const int64_t rank = (keep + kStride - 1) / kStride;
    *seconds = seconds_of([&] { above_sampled(x, n, keep, places, kStride, rank, at, taken); });
    return "";
  }
  const int64_t bucket = timed.bucket_size;
  if (bucket < 1 || bucket > kLongestBucket) return "bucket_size is out of range";
  if (code == "largest of every bucket") {
    if (keep < 1 || keep > bucket) return "keep is out of range";
    const int64_t buckets = (n + bucket - 1) / bucket, bytes = buckets * keep * 4;
    if (!fits(bytes) || timed.taken.bytes != bytes) return "out or taken does not fit";
    return time_runs(bucket, [&](int64_t from, int64_t to) {
      codes.largest_of_buckets(x, n, bucket, keep, from / bucket, (to + bucket - 1) / bucket, at,
                               taken);
    });
  }
  BucketsCall call{Coded::kNatural, x, n, kKey, out, nullptr, timed.bucket_size, timed.levels};
  if (code == "natural") {
    call.width = 8;
  } else if (code == "ternary") {
    call.coded = Coded::kTernary;
  } else if (code == "qsgd" || code == "qsgd of the largest") {
    if (call.levels < 1 || call.levels > 127) return "levels is out of range";
    call.coded = Coded::kSteps;
    call.l2 = code == "qsgd";
    while (2 * call.levels >> call.width != 0) ++call.width;
  } else {
    return "there is no code " + code + " of these sizes";
  }
  const int64_t packed = call.width == 0 ? (n + 4) / 5 : (n * call.width + 7) / 8;
  const int64_t scales = code == "natural" ? 0 : (n + call.bucket_size - 1) / call.bucket_size;
  if (!fits(packed + 4 * scales)) {
    return "out does not fit";
  }
  call.scales = out + packed;
  *seconds = seconds_of([&] { encode_buckets(pool, 1, [&](int64_t) { return call; }); });
  return "";
}

std::string time_copy(void* to, const void* from, int64_t bytes, int64_t threads, double* seconds) {
  if (threads < 1 || threads > kMostThreads) return kFewerThreads;
  WorkerPool pool(threads);
  *seconds = seconds_of([&] {
    split_range(pool, 1, 0, bytes, threads, [&](int64_t, int64_t first, int64_t last, int64_t) {
      memcpy(static_cast<char*>(to) + first, static_cast<const char*>(from) + first, last - first);
    });
  });
  return "";
}

// What f() says or throws, as when the system refuses threads, valid until the thread's next call;
// null for "".
template <typename F>
const char* said(F&& f) {
  thread_local std::string error;
  try {
    error = f();
  } catch (const std::exception& thrown) {
    error = thrown.what();
  }
  return error.empty() ? nullptr : error.c_str();
}

}  // namespace
}  // namespace cgx

// What is wrong with the call, valid until the thread's next one; null when nothing is.
CGX_EXPORT const char* cgx_time_kernel(const Timed* timed, double* seconds) {
  return cgx::said([&] { return cgx::time_kernel(*timed, seconds); });
}

CGX_EXPORT const char* cgx_time_code(const TimedCode* timed, double* seconds) {
  return cgx::said([&] { return cgx::time_code(*timed, seconds); });
}

// Times memcpy, split evenly over the threads.
CGX_EXPORT const char* cgx_time_copy(void* to, const void* from, int64_t bytes, int64_t threads,
                                     double* seconds) {
  return cgx::said([&] { return cgx::time_copy(to, from, bytes, threads, seconds); });
}

// Instruction set number `i` of those compiled in and supported here, best first; null at the end.
CGX_EXPORT const char* cgx_isa(int64_t i) {
  const cgx::KernelTable* const table = cgx::available_kernels()[i];
  return table ? table->isa : nullptr;
}

// Chooses one for the calls that follow; false when there is no such one.
CGX_EXPORT bool cgx_set_isa(const char* isa) { return cgx::select_kernels(isa); }
