#include "cpu/kernels.h"
#include "cpu/pages.h"
#include "cpu/parallel.h"
#include "cpu/select.h"
#include "handlers/code_calls.h"

namespace cgx {
namespace {

// Runs the calls on the threads of XLA's pool.
struct Cpu {
  using Context = ffi::ThreadPool;
  using Given = ffi::ThreadPool;
  static constexpr auto kTraits = ffi::Traits{};
  static constexpr int64_t kShortestBucket = 1, kLongestBucket = int64_t{1} << 31;

  static ffi::Error pack_signs(Given pool, int64_t batch, int64_t n, const float* x, uint8_t* out) {
    prefer_huge_pages(out, batch * ((n + 7) / 8));
    const CodeKernels& codes = current_kernels().codes;
    split_runs(pool, batch, n, 8, [&](int64_t b, int64_t from, int64_t to) {
      codes.pack_signs(x + b * n + from, to - from, out + b * ((n + 7) / 8) + from / 8);
    });
    return ffi::Error::Success();
  }

  static ffi::Error unpack_signs(Given pool, int64_t batch, int64_t n, const uint8_t* payload,
                                 float* out) {
    prefer_huge_pages(out, 4 * batch * n);
    const CodeKernels& codes = current_kernels().codes;
    split_runs(pool, batch, n, 8, [&](int64_t b, int64_t from, int64_t to) {
      codes.unpack_signs(payload + b * ((n + 7) / 8) + from / 8, to - from,
                         batch * n > kNontemporalValues, out + b * n + from);
    });
    return ffi::Error::Success();
  }

  static ffi::Error select(Given pool, const Selections& all, ffi::RemainingRets scratch) {
    CGX_TRY(check_number(all.name, "results", 2 + scratch.size(), 2));
    const auto [name, batch, n, count, x, turns, stride, rank, at, taken] = all;
    if (!turns) {
      for (int64_t b = 0; b < batch; ++b) {
        largest(pool, x + b * n, n, count, at + b * count, taken + b * count);
      }
      return ffi::Error::Success();
    }
    for (int64_t i = 0; i < 2 * batch; ++i) {
      if (turns[i] < 0 || turns[i] >= n) {
        return invalid(name, "turn is " + std::to_string(turns[i]) + ", must be in [0, " +
                                 std::to_string(n) + ")");
      }
    }
    parallel_for(pool, batch, [&all](int64_t b, int64_t) {
      above_sampled(all.x + b * all.n, all.n, all.count, all.turns + 2 * b, all.stride, all.rank,
                    all.at + b * all.count, all.taken + b * all.count);
    });
    return ffi::Error::Success();
  }

  static ffi::Error largest_of_buckets(Given pool, int64_t batch, int64_t n, const float* x,
                                       int64_t bucket_size, int64_t keep, int32_t* at,
                                       float* taken) {
    const CodeKernels& codes = current_kernels().codes;
    const int64_t count = (n + bucket_size - 1) / bucket_size * keep;
    prefer_huge_pages(at, 4 * batch * count);
    prefer_huge_pages(taken, 4 * batch * count);
    split_runs(pool, batch, n, bucket_size, [&](int64_t b, int64_t from, int64_t to) {
      codes.largest_of_buckets(x + b * n, n, bucket_size, keep, from / bucket_size,
                               (to + bucket_size - 1) / bucket_size, at + b * count,
                               taken + b * count);
    });
    return ffi::Error::Success();
  }

  template <typename Call>
  static ffi::Error encode_buckets(Given pool, int64_t batch, int64_t bytes, Call call) {
    prefer_huge_pages(call(0).codes, batch * bytes);
    cgx::encode_buckets(pool, batch, call);
    return ffi::Error::Success();
  }
};

}  // namespace

std::vector<CodeHandler> code_handlers() {
  using Calls = CodeCalls<Cpu>;
  return {{"cgx_pack_signs", Calls::pack_signs},
          {"cgx_unpack_signs", Calls::unpack_signs},
          {"cgx_largest", Calls::largest},
          {"cgx_above_sampled", Calls::above_sampled},
          {"cgx_largest_of_buckets", Calls::largest_of_buckets},
          {"cgx_natural", Calls::natural},
          {"cgx_ternary", Calls::ternary},
          {"cgx_qsgd", Calls::qsgd}};
}

}  // namespace cgx
