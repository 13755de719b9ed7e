// The XLA calls that encode and decode codes, for any platform. This file declares and checks what
// each call takes and returns. The batch is the leading dimension of all operands and results.
#ifndef CGX_HANDLERS_CODE_CALLS_H_
#define CGX_HANDLERS_CODE_CALLS_H_

#include <string>

#include "format/codes.h"
#include "handlers/bind.h"

namespace cgx {

// Selects `count` of n values in each row of a batch: the largest ones or, if `turns` is not null,
// those above a sampled bound (cpu/select.h).
struct Selections {
  const char* name;
  int64_t batch, n, count;
  const float* x;
  const int32_t* turns;
  int64_t stride, rank;
  int32_t* at;
  float* taken;
};

// `Device` does the work. Device::Given is what the call receives of its context. Device has a
// function for each call that it offers, and the sizes of the shortest and the longest bucket. A
// selection's remaining results are its scratch.
template <typename Device>
class CodeCalls {
  using Given = typename Device::Given;
  using Values = ffi::Buffer<ffi::F32, 2>;
  using Bytes = ffi::Buffer<ffi::U8, 2>;
  using Places = ffi::Buffer<ffi::S32, 2>;
  using Words = ffi::Buffer<ffi::U32, 2>;

 public:
  static XLA_FFI_Error* pack_signs(XLA_FFI_CallFrame* frame) {
    return call<run_pack_signs>(frame, "cgx_pack_signs");
  }
  static XLA_FFI_Error* unpack_signs(XLA_FFI_CallFrame* frame) {
    return call<run_unpack_signs>(frame, "cgx_unpack_signs", "count");
  }
  static XLA_FFI_Error* largest(XLA_FFI_CallFrame* frame) {
    return call<run_largest>(frame, "cgx_largest", "count");
  }
  static XLA_FFI_Error* above_sampled(XLA_FFI_CallFrame* frame) {
    return call<run_above_sampled>(frame, "cgx_above_sampled", "count", "stride", "rank");
  }
  static XLA_FFI_Error* largest_of_buckets(XLA_FFI_CallFrame* frame) {
    return call<run_largest_of_buckets>(frame, "cgx_largest_of_buckets", "bucket_size", "keep");
  }
  static XLA_FFI_Error* natural(XLA_FFI_CallFrame* frame) {
    return call<run_natural>(frame, "cgx_natural");
  }
  static XLA_FFI_Error* ternary(XLA_FFI_CallFrame* frame) {
    return call<run_ternary>(frame, "cgx_ternary", "bucket_size");
  }
  static XLA_FFI_Error* qsgd(XLA_FFI_CallFrame* frame) {
    return call<run_qsgd>(frame, "cgx_qsgd", "bucket_size", "levels", "l2");
  }

 private:
  template <auto kFunction, typename... Names>
  static XLA_FFI_Error* call(XLA_FFI_CallFrame* frame, const char* name, Names... attributes) {
    return named_call<kFunction, Device::kTraits>(frame, name, attributes...);
  }

  template <typename Buffer>
  static int64_t rows(const Buffer& buffer) {
    return buffer.dimensions()[0];
  }
  template <typename Buffer>
  static int64_t columns(const Buffer& buffer) {
    return buffer.dimensions()[1];
  }

  // The number of rows of a result, or 0 if it has no values. A result without values may claim any
  // number of rows, even too many to loop over.
  template <typename Buffer>
  static int64_t filled_rows(const Buffer& result) {
    return result.element_count() == 0 ? 0 : rows(result);
  }

  // Checks that a matrix has `batch` rows and `limit` columns.
  template <typename Buffer>
  static ffi::Error check_shape(const std::string& call, const std::string& what,
                                const Buffer& buffer, int64_t batch, int64_t limit) {
    if (rows(buffer) != batch)
      return invalid(call, expected("batch of " + what, rows(buffer), batch));
    if (columns(buffer) != limit) {
      return invalid(call, expected("size of " + what, columns(buffer), limit));
    }
    return ffi::Error::Success();
  }

  // Even an array without values may claim too many columns to calculate with.
  static ffi::Error check_columns(const char* name, int64_t n) {
    return check_within(name, "size of x", n, kMaxSize, 0);
  }

  static ffi::Error check_selection(const char* name, const Values& x, const Places& at,
                                    const Values& taken, int64_t count) {
    const int64_t n = columns(x);
    CGX_TRY(check_shape(name, "places", at, rows(x), count));
    CGX_TRY(check_shape(name, "taken", taken, rows(x), count));
    if (n >= int64_t{1} << 31) {
      return invalid(name, expected("size of x", n, (int64_t{1} << 31) - 1));
    }
    return check_within(name, "count", count, n);
  }

  static ffi::Error run_pack_signs(const char* name, Given device, Values x,
                                   ffi::Result<Bytes> out) {
    CGX_TRY(check_columns(name, columns(x)));
    CGX_TRY(check_shape(name, "payload", *out, rows(x), (columns(x) + 7) / 8));
    return Device::pack_signs(device, filled_rows(*out), columns(x), x.typed_data(),
                              out->typed_data());
  }

  static ffi::Error run_unpack_signs(const char* name, Given device, Bytes payload,
                                     ffi::Result<Values> out, int64_t n) {
    const int64_t batch = rows(payload);
    CGX_TRY(check_within(name, "count", n, kMaxSize, 0));
    CGX_TRY(check_shape(name, "payload", payload, batch, (n + 7) / 8));
    CGX_TRY(check_shape(name, "result", *out, batch, n));
    return Device::unpack_signs(device, filled_rows(*out), n, payload.typed_data(),
                                out->typed_data());
  }

  static ffi::Error run_largest(const char* name, Given device, Values x, ffi::Result<Places> at,
                                ffi::Result<Values> taken, ffi::RemainingRets scratch,
                                int64_t count) {
    CGX_TRY(check_selection(name, x, *at, *taken, count));
    return Device::select(device,
                          {name, rows(x), columns(x), count, x.typed_data(), nullptr, 1, count,
                           at->typed_data(), taken->typed_data()},
                          scratch);
  }

  static ffi::Error run_above_sampled(const char* name, Given device, Values x, Places turns,
                                      ffi::Result<Places> at, ffi::Result<Values> taken,
                                      ffi::RemainingRets scratch, int64_t count, int64_t stride,
                                      int64_t rank) {
    const int64_t n = columns(x);
    CGX_TRY(check_selection(name, x, *at, *taken, count));
    CGX_TRY(check_shape(name, "turns", turns, rows(x), 2));
    CGX_TRY(check_within(name, "stride", stride, n));
    CGX_TRY(check_within(name, "rank", rank, (n + stride - 1) / stride));
    return Device::select(device,
                          {name, rows(x), n, count, x.typed_data(), turns.typed_data(), stride,
                           rank, at->typed_data(), taken->typed_data()},
                          scratch);
  }

  static ffi::Error run_largest_of_buckets(const char* name, Given device, Values x,
                                           ffi::Result<Places> at, ffi::Result<Values> taken,
                                           int64_t bucket_size, int64_t keep) {
    CGX_TRY(check_within(name, "bucket_size", bucket_size, kLongestBucket));
    CGX_TRY(check_within(name, "keep", keep, bucket_size));
    CGX_TRY(check_columns(name, columns(x)));
    const int64_t count = (columns(x) + bucket_size - 1) / bucket_size * keep;
    CGX_TRY(check_shape(name, "places", *at, rows(x), count));
    CGX_TRY(check_shape(name, "taken", *taken, rows(x), count));
    return Device::largest_of_buckets(device, filled_rows(*at), columns(x), x.typed_data(),
                                      bucket_size, keep, at->typed_data(), taken->typed_data());
  }

  // Encodes buckets as `one` says; this function sets n and the pointers of its copies. The payload
  // holds the codes, then the scales.
  static ffi::Error encode_all(const char* name, Given device, Words words, Values x,
                               ffi::Result<Bytes> out, BucketsCall one) {
    const int64_t batch = rows(x), n = columns(x);
    CGX_TRY(check_columns(name, n));
    const int64_t most = one.l2 ? kLongestBucket : Device::kLongestBucket;
    CGX_TRY(check_within(name, "bucket_size", one.bucket_size, most, Device::kShortestBucket));
    const int64_t packed = one.width == 0 ? (n + 4) / 5 : (n * one.width + 7) / 8;
    const bool scaled = one.coded != Coded::kNatural;
    const int64_t bytes = packed + scaled * 4 * ((n + one.bucket_size - 1) / one.bucket_size);
    CGX_TRY(check_shape(name, "words", words, batch, 2));
    CGX_TRY(check_shape(name, "payload", *out, batch, bytes));
    one.n = n;
    return Device::encode_buckets(device, filled_rows(*out), bytes, [&](int64_t b) {
      BucketsCall own = one;
      own.x = x.typed_data() + b * n;
      own.key = words.typed_data() + 2 * b;
      own.codes = out->typed_data() + b * bytes;
      own.scales = own.codes + packed;
      return own;
    });
  }

  static ffi::Error run_natural(const char* name, Given device, Words words, Values x,
                                ffi::Result<Bytes> out) {
    BucketsCall one{};
    one.coded = Coded::kNatural;
    one.bucket_size = 512;  // only for the noise: these buckets have no scale
    one.width = 8;
    return encode_all(name, device, words, x, out, one);
  }

  static ffi::Error run_ternary(const char* name, Given device, Words words, Values x,
                                ffi::Result<Bytes> out, int64_t bucket_size) {
    BucketsCall one{};
    one.coded = Coded::kTernary;
    one.bucket_size = bucket_size;
    return encode_all(name, device, words, x, out, one);
  }

  static ffi::Error run_qsgd(const char* name, Given device, Words words, Values x,
                             ffi::Result<Bytes> out, int64_t bucket_size, int64_t levels,
                             int64_t l2) {
    CGX_TRY(check_within(name, "levels", levels, 127));
    BucketsCall one{};
    one.coded = Coded::kSteps;
    one.bucket_size = bucket_size;
    one.levels = levels;
    one.l2 = l2 != 0;
    while (2 * levels >> one.width != 0) ++one.width;
    return encode_all(name, device, words, x, out, one);
  }
};

}  // namespace cgx

#endif  // CGX_HANDLERS_CODE_CALLS_H_
