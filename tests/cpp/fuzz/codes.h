// Makes right calls of the handlers of codes, as xla_ffi/handlers/code_calls.h describes them.
#ifndef CGX_TESTS_FUZZ_CODES_H_
#define CGX_TESTS_FUZZ_CODES_H_

#include <algorithm>

#include "fuzz/calls.h"

namespace fuzz {

// What differs between devices.
struct Codes {
  int64_t most;             // values
  int64_t shortest_bucket;  // of noise
  int64_t scratch;          // words that a selection takes; 0: none
};

inline Call pack_signs_call(Random& random, const Codes& device) {
  Call call;
  const int64_t batch = random.below(4), n = random.size(device.most);
  call.arg(random, XLA_FFI_DataType_F32, {batch, n});
  call.ret(random, XLA_FFI_DataType_U8, {batch, (n + 7) / 8});
  return call;
}

inline Call unpack_signs_call(Random& random, const Codes& device) {
  Call call;
  const int64_t batch = random.below(4), n = random.size(device.most);
  call.arg(random, XLA_FFI_DataType_U8, {batch, (n + 7) / 8});
  call.ret(random, XLA_FFI_DataType_F32, {batch, n});
  call.attributes["count"] = n;
  return call;
}

// Selects the largest values, or those above a sampled bound.
inline Call select_call(Random& random, const Codes& device, bool sampled) {
  Call call;
  const int64_t batch = random.below(4), n = random.size(device.most) + 1;
  const int64_t count = random.chance(4) ? random.within(1, n) : std::min<int64_t>(n, 5);
  call.arg(random, XLA_FFI_DataType_F32, {batch, n});
  if (sampled) {
    call.places(random, {batch, 2}, 0, n - 1);
    const int64_t stride = random.within(1, random.chance(2) ? n : std::min<int64_t>(n, 4));
    call.attributes["stride"] = stride;
    call.attributes["rank"] = random.within(1, (n + stride - 1) / stride);
  }
  call.ret(random, XLA_FFI_DataType_S32, {batch, count});
  call.ret(random, XLA_FFI_DataType_F32, {batch, count});
  if (device.scratch > 0) call.ret(random, XLA_FFI_DataType_U32, {device.scratch});
  call.attributes["count"] = count;
  return call;
}
inline Call largest_call(Random& random, const Codes& device) {
  return select_call(random, device, false);
}
inline Call above_sampled_call(Random& random, const Codes& device) {
  return select_call(random, device, true);
}

inline Call largest_of_buckets_call(Random& random, const Codes& device) {
  Call call;
  const int64_t batch = random.below(4), n = random.size(device.most);
  const int64_t bucket = random.chance(4) ? random.within(1, 4096) : random.within(1, 100);
  const int64_t keep = random.within(1, std::min<int64_t>(bucket, random.chance(4) ? bucket : 4));
  const int64_t count = (n + bucket - 1) / bucket * keep;
  call.arg(random, XLA_FFI_DataType_F32, {batch, n});
  call.ret(random, XLA_FFI_DataType_S32, {batch, count});
  call.ret(random, XLA_FFI_DataType_F32, {batch, count});
  call.attributes["bucket_size"] = bucket;
  call.attributes["keep"] = keep;
  return call;
}

// The payload is `packed` bytes of codes and, if there are buckets, one scale per bucket.
inline Call levels_call(Random& random, int64_t n, int64_t packed, int64_t bucket) {
  Call call;
  const int64_t batch = random.below(4);
  call.arg(random, XLA_FFI_DataType_U32, {batch, 2});
  call.arg(random, XLA_FFI_DataType_F32, {batch, n});
  const int64_t scales = bucket == 0 ? 0 : (n + bucket - 1) / bucket;
  call.ret(random, XLA_FFI_DataType_U8, {batch, packed + 4 * scales});
  if (bucket > 0) call.attributes["bucket_size"] = bucket;
  return call;
}

inline Call natural_call(Random& random, const Codes& device) {
  const int64_t n = random.size(device.most);
  return levels_call(random, n, n, 0);
}

inline int64_t some_bucket(Random& random, const Codes& device) {
  return random.within(device.shortest_bucket, random.chance(4) ? 4096 : 130);
}

inline Call ternary_call(Random& random, const Codes& device) {
  const int64_t n = random.size(device.most);
  return levels_call(random, n, (n + 4) / 5, some_bucket(random, device));
}

inline Call qsgd_call(Random& random, const Codes& device) {
  const int64_t n = random.size(device.most), levels = random.within(1, 127);
  int64_t width = 0;
  while (2 * levels >> width != 0) ++width;
  Call call = levels_call(random, n, (n * width + 7) / 8, some_bucket(random, device));
  call.attributes["levels"] = levels;
  call.attributes["l2"] = random.below(2);
  return call;
}

using MakeCode = Call (*)(Random& random, const Codes& device);
// The function that makes calls of a target.
inline MakeCode code_maker(const std::string& target) {
  const std::pair<const char*, MakeCode> all[] = {
      {"cgx_pack_signs", pack_signs_call},
      {"cgx_unpack_signs", unpack_signs_call},
      {"cgx_largest", largest_call},
      {"cgx_above_sampled", above_sampled_call},
      {"cgx_largest_of_buckets", largest_of_buckets_call},
      {"cgx_natural", natural_call},
      {"cgx_ternary", ternary_call},
      {"cgx_qsgd", qsgd_call},
  };
  for (const auto& [name, make] : all) {
    if (name == target) return make;
  }
  fail(target + " has no maker of calls");
}

}  // namespace fuzz

#endif  // CGX_TESTS_FUZZ_CODES_H_
