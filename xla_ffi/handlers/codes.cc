#include "handlers/codes.h"

#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/scatter.h"
#include "cpu/select.h"
#include "handlers/checks.h"
#include "handlers/fresh_results.h"

namespace cgx {
namespace {

using Values = ffi::Buffer<ffi::F32, 2>;
using Bytes = ffi::Buffer<ffi::U8, 2>;
using Places = ffi::Buffer<ffi::S32, 2>;
using Words = ffi::Buffer<ffi::U32, 2>;

template <typename Buffer>
int64_t columns(const Buffer& buffer) {
  return buffer.dimensions()[1];
}

// A matrix of as many rows as `batch`, and of so many columns.
template <typename Buffer>
ffi::Error check_shape(const std::string& call, const std::string& what, const Buffer& buffer,
                       int64_t batch, int64_t limit) {
  const auto dims = buffer.dimensions();
  if (dims[0] != batch) return invalid(call, expected("batch of " + what, dims[0], batch));
  if (dims[1] != limit) return invalid(call, expected("size of " + what, dims[1], limit));
  return ffi::Error::Success();
}

ffi::Error check_within(const char* name, const char* what, int64_t value, int64_t most) {
  if (value >= 1 && value <= most) return ffi::Error::Success();
  return invalid(name, std::string(what) + " is " + std::to_string(value) + ", must be in [1, " +
                           std::to_string(most) + "]");
}

ffi::Error pack_signs(ffi::ThreadPool pool, Values x, ffi::Result<Bytes> out) {
  const char* const name = "cgx_pack_signs";
  const int64_t batch = x.dimensions()[0], n = columns(x), bytes = (n + 7) / 8;
  CGX_TRY(check_shape(name, "payload", *out, batch, bytes));
  prefer_huge_pages(out);
  const CodeKernels& codes = current_kernels().codes;
  split_runs(pool, batch, n, 8, [&](int64_t b, int64_t from, int64_t to) {
    codes.pack_signs(x.typed_data() + b * n + from, to - from,
                     out->typed_data() + b * bytes + from / 8);
  });
  return ffi::Error::Success();
}

ffi::Error unpack_signs(ffi::ThreadPool pool, Bytes payload, ffi::Result<Values> out, int64_t n) {
  const char* const name = "cgx_unpack_signs";
  const int64_t batch = payload.dimensions()[0], bytes = (n + 7) / 8;
  CGX_TRY(check_shape(name, "payload", payload, batch, bytes));
  CGX_TRY(check_shape(name, "result", *out, batch, n));
  prefer_huge_pages(out);
  const CodeKernels& codes = current_kernels().codes;
  split_runs(pool, batch, n, 8, [&](int64_t b, int64_t from, int64_t to) {
    codes.unpack_signs(payload.typed_data() + b * bytes + from / 8, to - from,
                       batch * n > kNontemporalValues, out->typed_data() + b * n + from);
  });
  return ffi::Error::Success();
}

ffi::Error check_selection(const char* name, const Values& x, const Places& at, const Values& taken,
                           int64_t count) {
  const int64_t batch = x.dimensions()[0], n = columns(x);
  CGX_TRY(check_shape(name, "places", at, batch, count));
  CGX_TRY(check_shape(name, "taken", taken, batch, count));
  if (n >= int64_t{1} << 31) return invalid(name, expected("size of x", n, (int64_t{1} << 31) - 1));
  return check_within(name, "count", count, n);
}

ffi::Error select_largest(ffi::ThreadPool pool, Values x, ffi::Result<Places> at,
                          ffi::Result<Values> taken, int64_t count) {
  const char* const name = "cgx_largest";
  return no_throw(name, [&]() -> ffi::Error {
    CGX_TRY(check_selection(name, x, *at, *taken, count));
    const int64_t n = columns(x);
    for (int64_t b = 0; b < x.dimensions()[0]; ++b) {
      largest(pool, x.typed_data() + b * n, n, count, at->typed_data() + b * count,
              taken->typed_data() + b * count);
    }
    return ffi::Error::Success();
  });
}

ffi::Error select_above_sampled(ffi::ThreadPool pool, Values x, Places turns,
                                ffi::Result<Places> at, ffi::Result<Values> taken, int64_t count,
                                int64_t stride, int64_t rank) {
  const char* const name = "cgx_above_sampled";
  return no_throw(name, [&]() -> ffi::Error {
    CGX_TRY(check_selection(name, x, *at, *taken, count));
    const int64_t batch = x.dimensions()[0], n = columns(x);
    CGX_TRY(check_shape(name, "turns", turns, batch, 2));
    CGX_TRY(check_within(name, "stride", stride, n));
    CGX_TRY(check_within(name, "rank", rank, (n + stride - 1) / stride));
    for (int64_t i = 0; i < 2 * batch; ++i) {
      const int64_t turn = turns.typed_data()[i];
      if (turn < 0 || turn >= n) {
        return invalid(name, "turn is " + std::to_string(turn) + ", must be in [0, " +
                                 std::to_string(n) + ")");
      }
    }
    parallel_for(pool, batch, [&](int64_t b, int64_t) {
      above_sampled(x.typed_data() + b * n, n, count, turns.typed_data() + 2 * b, stride, rank,
                    at->typed_data() + b * count, taken->typed_data() + b * count);
    });
    return ffi::Error::Success();
  });
}

ffi::Error largest_of_buckets(ffi::ThreadPool pool, Values x, ffi::Result<Places> at,
                              ffi::Result<Values> taken, int64_t bucket_size, int64_t keep) {
  const char* const name = "cgx_largest_of_buckets";
  CGX_TRY(check_within(name, "bucket_size", bucket_size, kLongestBucket));
  CGX_TRY(check_within(name, "keep", keep, bucket_size));
  const int64_t batch = x.dimensions()[0], n = columns(x);
  const int64_t count = (n + bucket_size - 1) / bucket_size * keep;
  CGX_TRY(check_shape(name, "places", *at, batch, count));
  CGX_TRY(check_shape(name, "taken", *taken, batch, count));
  prefer_huge_pages(at);
  prefer_huge_pages(taken);
  const CodeKernels& codes = current_kernels().codes;
  split_runs(pool, batch, n, bucket_size, [&](int64_t b, int64_t from, int64_t to) {
    codes.largest_of_buckets(x.typed_data() + b * n, n, bucket_size, keep, from / bucket_size,
                             (to + bucket_size - 1) / bucket_size, at->typed_data() + b * count,
                             taken->typed_data() + b * count);
  });
  return ffi::Error::Success();
}

ffi::Error sum_scattered(ffi::ThreadPool pool, Places at, Values taken, ffi::Result<Values> out,
                         int64_t size, int64_t ranks) {
  const char* const name = "cgx_scatter_sum";
  const int64_t batch = at.dimensions()[0], count = columns(at);
  if (ranks < 1 || count % ranks != 0) {
    return invalid(name, "number of places is " + std::to_string(count) +
                             ", must be as many for each of " + std::to_string(ranks) + " ranks");
  }
  CGX_TRY(check_shape(name, "taken", taken, batch, count));
  CGX_TRY(check_shape(name, "result", *out, batch, size));
  prefer_huge_pages(out);
  for (int64_t b = 0; b < batch; ++b) {
    scatter_sum(pool, at.typed_data() + b * count, taken.typed_data() + b * count, count,
                out->typed_data() + b * size, size);
  }
  return ffi::Error::Success();
}

// Codes of buckets as `one` says, which is filled in; the payload is codes, then scales.
ffi::Error encode_all(const char* name, ffi::ThreadPool pool, Words words, Values x,
                      ffi::Result<Bytes> out, BucketsCall one) {
  const int64_t batch = x.dimensions()[0], n = columns(x);
  constexpr int64_t kAny = int64_t{1} << 31;
  CGX_TRY(check_within(name, "bucket_size", one.bucket_size, one.l2 ? kLongestBucket : kAny));
  const int64_t packed = one.width == 0 ? (n + 4) / 5 : (n * one.width + 7) / 8;
  const bool scaled = one.coded != Coded::kNatural;
  const int64_t bytes = packed + scaled * 4 * ((n + one.bucket_size - 1) / one.bucket_size);
  CGX_TRY(check_shape(name, "words", words, batch, 2));
  CGX_TRY(check_shape(name, "payload", *out, batch, bytes));
  prefer_huge_pages(out);
  one.n = n;
  encode_buckets(pool, batch, [&](int64_t b) {
    BucketsCall own = one;
    own.x = x.typed_data() + b * n;
    own.key = words.typed_data() + 2 * b;
    own.codes = out->typed_data() + b * bytes;
    own.scales = own.codes + packed;
    return own;
  });
  return ffi::Error::Success();
}

ffi::Error natural(ffi::ThreadPool pool, Words words, Values x, ffi::Result<Bytes> out) {
  BucketsCall one{};
  one.coded = Coded::kNatural;
  one.bucket_size = 512;  // of noise: a bucket has no scale
  one.width = 8;
  return encode_all("cgx_natural", pool, words, x, out, one);
}

ffi::Error ternary(ffi::ThreadPool pool, Words words, Values x, ffi::Result<Bytes> out,
                   int64_t bucket_size) {
  BucketsCall one{};
  one.coded = Coded::kTernary;
  one.bucket_size = bucket_size;
  return encode_all("cgx_ternary", pool, words, x, out, one);
}

ffi::Error qsgd(ffi::ThreadPool pool, Words words, Values x, ffi::Result<Bytes> out,
                int64_t bucket_size, int64_t levels, int64_t l2) {
  const char* const name = "cgx_qsgd";
  CGX_TRY(check_within(name, "levels", levels, 127));
  BucketsCall one{};
  one.coded = Coded::kSteps;
  one.bucket_size = bucket_size;
  one.levels = levels;
  one.l2 = l2 != 0;
  while (2 * levels >> one.width != 0) ++one.width;
  return encode_all(name, pool, words, x, out, one);
}

}  // namespace

XLA_FFI_Error* pack_signs_handler(XLA_FFI_CallFrame* frame) {
  static const auto handler =
      ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Values>().Ret<Bytes>().To(pack_signs);
  return handler->Call(frame);
}

XLA_FFI_Error* unpack_signs_handler(XLA_FFI_CallFrame* frame) {
  static const auto handler =
      ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Bytes>().Ret<Values>().Attr<int64_t>("count").To(
          unpack_signs);
  return handler->Call(frame);
}

XLA_FFI_Error* largest_handler(XLA_FFI_CallFrame* frame) {
  static const auto handler = ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Values>()
                                  .Ret<Places>()
                                  .Ret<Values>()
                                  .Attr<int64_t>("count")
                                  .To(select_largest);
  return handler->Call(frame);
}

XLA_FFI_Error* above_sampled_handler(XLA_FFI_CallFrame* frame) {
  static const auto handler = ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Values>()
                                  .Arg<Places>()
                                  .Ret<Places>()
                                  .Ret<Values>()
                                  .Attr<int64_t>("count")
                                  .Attr<int64_t>("stride")
                                  .Attr<int64_t>("rank")
                                  .To(select_above_sampled);
  return handler->Call(frame);
}

XLA_FFI_Error* largest_of_buckets_handler(XLA_FFI_CallFrame* frame) {
  static const auto handler = ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Values>()
                                  .Ret<Places>()
                                  .Ret<Values>()
                                  .Attr<int64_t>("bucket_size")
                                  .Attr<int64_t>("keep")
                                  .To(largest_of_buckets);
  return handler->Call(frame);
}

XLA_FFI_Error* scatter_sum_handler(XLA_FFI_CallFrame* frame) {
  static const auto handler = ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Places>()
                                  .Arg<Values>()
                                  .Ret<Values>()
                                  .Attr<int64_t>("size")
                                  .Attr<int64_t>("ranks")
                                  .To(sum_scattered);
  return handler->Call(frame);
}

XLA_FFI_Error* natural_handler(XLA_FFI_CallFrame* frame) {
  static const auto handler =
      ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Words>().Arg<Values>().Ret<Bytes>().To(natural);
  return handler->Call(frame);
}

XLA_FFI_Error* ternary_handler(XLA_FFI_CallFrame* frame) {
  static const auto handler = ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Words>()
                                  .Arg<Values>()
                                  .Ret<Bytes>()
                                  .Attr<int64_t>("bucket_size")
                                  .To(ternary);
  return handler->Call(frame);
}

XLA_FFI_Error* qsgd_handler(XLA_FFI_CallFrame* frame) {
  static const auto handler = ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Words>()
                                  .Arg<Values>()
                                  .Ret<Bytes>()
                                  .Attr<int64_t>("bucket_size")
                                  .Attr<int64_t>("levels")
                                  .Attr<int64_t>("l2")
                                  .To(qsgd);
  return handler->Call(frame);
}

}  // namespace cgx
