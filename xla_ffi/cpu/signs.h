// Signs, one bit each. Included only by cpu/codes.cc; everything lives in the instruction set's
// namespace.
#ifndef CGX_CPU_SIGNS_H_
#define CGX_CPU_SIGNS_H_

#include "cpu/masks.h"

namespace cgx {
inline namespace CGX_ISA {
namespace {

void pack_signs(const float* x, int64_t n, uint8_t* out) {
  constexpr int kBlock = 64;
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    prefetch_l2<kBlock * 4>((const char*)(x + i) + kFarAhead);
    uint64_t bits = 0;
#pragma GCC unroll 16
    for (int j = 0; j < kBlock; j += kLanes) {
      bits |= (uint64_t)not_negative(load<F32>(x + i + j)) << j;
    }
    store(out + i / 8, bits);
  }
  for (; i < n; i += 8) {
    uint8_t byte = 0;
    for (int64_t j = i; j < n && j < i + 8; ++j) byte |= (uint8_t)(x[j] >= 0) << (j - i);
    out[i / 8] = byte;
  }
}

void unpack_signs(const uint8_t* from, int64_t n, bool large, float* out) {
  const bool past_caches = large && (uintptr_t)out % kLine == 0;
  constexpr int kBlock = kLine / 4;
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    const uint32_t bits = load<uint16_t>(from + i / 8);
    alignas(kLine) float value[kBlock];
#if defined(__AVX512F__)
    store(value, (F32)_mm512_mask_blend_ps(bits, _mm512_set1_ps(-1), _mm512_set1_ps(1)));
#else
#pragma GCC unroll 4
    for (int j = 0; j < kBlock; j += kLanes) {
      // 1 and -1 differ only in bit 31.
      const U32 away = (U32{} + ~bits) >> (lane_index() + (uint32_t)j) << 31;
      store(value + j, (F32)(away | 0x3f800000u));
    }
#endif
    past_caches ? store_line_nontemporal(out + i, value) : (void)memcpy(out + i, value, kLine);
  }
  for (; i < n; ++i) out[i] = from[i / 8] >> i % 8 & 1 ? 1.0f : -1.0f;
  end_nontemporal();
}

}  // namespace
}  // namespace CGX_ISA
}  // namespace cgx

#endif  // CGX_CPU_SIGNS_H_
