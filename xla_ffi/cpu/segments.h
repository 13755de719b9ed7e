// Which segments of a bucket are zero. Included only by cpu/kernels.cc; everything lives in
// the instruction set's namespace.
#ifndef CGX_CPU_SEGMENTS_H_
#define CGX_CPU_SEGMENTS_H_

#include <string.h>

#include "cpu/buckets.h"

namespace cgx {
inline namespace CGX_ISA {
namespace {

CGX_HD bool is_zero(float x) { return bit_cast<uint32_t>(x) << 1 == 0; }
CGX_HD bool is_zero(uint16_t x) { return (uint16_t)(x << 1) == 0; }

// Whether a segment can be zero: whether the last value is, or one at a multiple of a kMaskBits-th
// of the bucket. A segment that ends before the bucket has such a value, because none is shorter.
template <typename Item>
CGX_HD bool may_have_zeros(const Item* x, int64_t n, int64_t bucket_size) {
  if (is_zero(x[n - 1])) return true;
  if (n == kUsualValues && bucket_size == kUsualValues) {
#pragma GCC unroll 16
    for (int i = 0; i < kMaskBits; ++i) {
      if (is_zero(x[i * (kUsualValues / kMaskBits)])) return true;
    }
    return false;
  }
  for (int64_t i = 0; i < n; i += bucket_size / kMaskBits) {
    if (is_zero(x[i])) return true;
  }
  return false;
}

// The mask of bucket `k`, whose values begin at x.
template <typename Item>
__attribute__((noinline)) uint32_t scan_segments(const Item* x, const Slot& slot, int64_t k) {
  const int64_t n = slot.bucket_values(k);
  const MaskSegments segments(slot, k);
  uint32_t mask = 0;
  for (int j = 0; segments.begin(j) < n; ++j) {
    int64_t i = segments.begin(j);
    const int64_t end = segments.end(j, n);
    while (i < end && is_zero(x[i])) ++i;
    mask |= (uint32_t)(i == end) << j;
  }
  return mask;
}

template <typename Item>
CGX_HD uint32_t zero_segments(const Item* x, const Slot& slot, int64_t k) {
  if (!may_have_zeros(x, slot.bucket_values(k), slot.bucket_size)) return 0;
  return scan_segments(x, slot, k);
}

CGX_HD uint32_t mask_of(const uint8_t* record) { return load<Header>(record).mask(); }

// Sets the masked values of bucket `k` to 0.
template <typename Item>
CGX_HD void clear_segments(Item* x, const Slot& slot, int64_t k, uint32_t mask) {
  if (mask == 0) return;
  const MaskSegments segments(slot, k);
  const int64_t n = slot.bucket_values(k);
  for (int j = 0; j < kMaskBits && segments.begin(j) < n; ++j) {
    if (mask >> j & 1u) {
      memset(x + segments.begin(j), 0, (segments.end(j, n) - segments.begin(j)) * sizeof(Item));
    }
  }
}

}  // namespace
}  // namespace CGX_ISA
}  // namespace cgx

#endif  // CGX_CPU_SEGMENTS_H_
