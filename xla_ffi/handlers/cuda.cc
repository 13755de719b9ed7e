// Puts the kernels of the calls on XLA's stream. Nothing here waits, reads device memory or
// allocates it, so XLA may record the calls into command buffers.
#include "cuda/codec.h"
#include "cuda/codes.h"
#include "handlers/code_calls.h"
#include "handlers/codec_calls.h"
#include "handlers/handlers.h"

namespace cgx {
namespace {

// Runs the calls batch element by batch element.
struct Cuda {
  using Given = cudaStream_t;
  static constexpr auto kTraits = ffi::Traits::kCmdBufferCompatible;
  static constexpr int64_t kLongestInUnits = kTileValues;
  static constexpr int64_t kShortestBucket = cgx::kShortestBucket;
  static constexpr int64_t kLongestBucket = cgx::kLongestBucket;

  static ffi::Error encode(Given stream, const Operands& all, uint8_t* payload) {
    const Layout layout = all.layout();
    return each(all.call, all.batch, [&](int64_t b) {
      const CudaEncode call{
          layout,           all.in(b),          all.out(b),
          all.keys + 2 * b, {all.ranks + b, 0}, payload + b * layout.world * layout.chunk_bytes,
          /*tails=*/true,   /*key_step=*/0,     all.leaf_units(b)};
      return cgx::encode(call, {{0, layout.total_bytes()}}, stream);
    });
  }

  static ffi::Error reduce(Given stream, const Operands& all, const uint8_t* payload,
                           uint8_t* chunks) {
    const Layout layout = all.layout();
    return each(all.call, all.batch, [&](int64_t b) {
      const CudaReduce call{layout,
                            all.in(b),
                            all.keys + 2 * b,
                            {all.ranks + b, 0},
                            payload + b * layout.world * layout.chunk_bytes,
                            all.divisor,
                            chunks + b * layout.chunk_bytes,
                            /*tails=*/true,
                            all.out(b),
                            all.leaf_units(b)};
      return cgx::reduce(call, {{0, layout.total_bytes()}}, stream);
    });
  }

  static ffi::Error decode(Given stream, const Operands& all, const uint8_t* payload) {
    const Layout layout = all.layout();
    return each(all.call, all.batch, [&](int64_t b) {
      return cgx::decode(
          {layout, payload + b * layout.world * layout.chunk_bytes, all.out(b), all.leaf_units(b)},
          {{0, layout.total_bytes()}}, stream);
    });
  }

  static ffi::Error accumulate(Given stream, const Operands& all, const uint8_t* payload,
                               int64_t peers) {
    const Layout layout = all.layout();
    return each(all.call, all.batch, [&](int64_t b) {
      const CudaAccumulate call{
          layout,    all.in(b),          payload + b * peers * layout.chunk_bytes,
          peers,     {all.ranks + b, 0}, all.divisor,
          all.out(b)};
      return cgx::accumulate(call, {{0, layout.total_bytes()}}, stream);
    });
  }

  // Batch elements run one after the other, so they share the scratch.
  static ffi::Error select(Given stream, const Selections& all, ffi::RemainingRets scratch) {
    CGX_TRY(check_number(all.name, "results", 2 + scratch.size(), 3));
    auto words = scratch.get<ffi::BufferR1<ffi::U32>>(0);
    if (words.has_error()) return words.error();
    CGX_TRY(check_count(all.name, "scratch", **words, kScratchWords));
    uint32_t* const data = (*words)->typed_data();
    return each(all.name, all.batch, [&](int64_t b) {
      return launch_select(
          {all.x + b * all.n, all.n, all.count, all.turns ? all.turns + 2 * b : nullptr, all.stride,
           all.rank, all.at + b * all.count, all.taken + b * all.count, data},
          stream);
    });
  }

  template <typename Call>
  static ffi::Error encode_buckets(Given stream, int64_t batch, int64_t, Call call) {
    return each("cgx_qsgd", batch, [&](int64_t b) { return launch_encode_steps(call(b), stream); });
  }

  static ffi::Error largest_of_buckets(Given stream, int64_t batch, int64_t n, const float* x,
                                       int64_t bucket_size, int64_t keep, int32_t* at,
                                       float* taken) {
    const int64_t count = (n + bucket_size - 1) / bucket_size * keep;
    return each("cgx_largest_of_buckets", batch, [&](int64_t b) {
      return launch_largest_of_buckets(x + b * n, n, bucket_size, keep, at + b * count,
                                       taken + b * count, stream);
    });
  }

 private:
  template <typename Launch>
  static ffi::Error each(const std::string& name, int64_t batch, Launch launch) {
    for (int64_t b = 0; b < batch; ++b) {
      const cudaError_t error = launch(b);
      if (error != cudaSuccess) {
        return ffi::Error::Internal(name + ": CUDA: " + cudaGetErrorString(error));
      }
    }
    return ffi::Error::Success();
  }
};

}  // namespace

std::vector<Handler> cuda_handlers() {
  using Codec = CodecCalls<Cuda>;
  using Codes = CodeCalls<Cuda>;
  return {{"cgx_encode", Codec::encode},
          {"cgx_reduce", Codec::reduce},
          {"cgx_decode", Codec::decode},
          {"cgx_accumulate", Codec::accumulate},
          {"cgx_largest", Codes::largest},
          {"cgx_above_sampled", Codes::above_sampled},
          {"cgx_largest_of_buckets", Codes::largest_of_buckets},
          {"cgx_qsgd", Codes::qsgd}};
}

}  // namespace cgx
