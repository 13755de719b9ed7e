// Comparisons of vectors, one bit per lane. Included only by cpu/codes.cc; everything lives in the
// instruction set's namespace.
#ifndef CGX_CPU_MASKS_H_
#define CGX_CPU_MASKS_H_

#include "cpu/vector.h"

namespace cgx {
inline namespace CGX_ISA {

// The mask of lanes that are each all ones or zero.
CGX_HD uint32_t mask_of(I32 lanes) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)lanes);
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)lanes);
#elif defined(__x86_64__)
  return _mm_movemask_ps((__m128)lanes);
#else
  uint32_t mask = 0;
  for (int i = 0; i < kLanes; ++i) mask |= (uint32_t)(lanes[i] & 1) << i;
  return mask;
#endif
}

CGX_HD uint32_t not_negative(F32 x) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)x, _mm512_setzero_ps(), _CMP_GE_OQ);
#else
  return mask_of(x >= F32{});
#endif
}

CGX_HD uint32_t at_least(I32 x, int32_t least) {
#if defined(__AVX512F__)
  return _mm512_cmpge_epi32_mask((__m512i)x, _mm512_set1_epi32(least));
#else
  return mask_of(x >= least);
#endif
}

CGX_HD I32 lesser_of(I32 a, I32 b) {
#if defined(__AVX512F__)
  return (I32)_mm512_min_epi32((__m512i)a, (__m512i)b);
#else
  return a < b ? a : b;
#endif
}

CGX_HD I32 greater_of(I32 a, I32 b) {
#if defined(__AVX512F__)
  return (I32)_mm512_max_epi32((__m512i)a, (__m512i)b);
#else
  return a > b ? a : b;
#endif
}

// x, negated where `sign` is negative.
CGX_HD I32 negated(I32 x, I32 sign) {
#if defined(__AVX512F__)
  const __mmask16 mask = _mm512_movepi32_mask((__m512i)sign);
  return (I32)_mm512_mask_sub_epi32((__m512i)x, mask, _mm512_setzero_si512(), (__m512i)x);
#else
  return (x ^ (sign >> 31)) - (sign >> 31);
#endif
}

// A value's bits without the sign. They have the same order as the magnitudes, NaN above infinity.
CGX_HD I32 magnitude_bits(F32 x) { return (I32)x & 0x7fffffff; }

// x, or 0 if x is subnormal. Some processors treat subnormals as 0, so all of them must.
CGX_HD F32 without_subnormals(F32 x) {
#if defined(__AVX512F__)
  constexpr int kSubnormal = 0x20;
  const __mmask16 mask = _mm512_fpclass_ps_mask((__m512)x, kSubnormal);
  return (F32)_mm512_mask_mov_ps((__m512)x, mask, _mm512_setzero_ps());
#else
  return (F32)((I32)x & (magnitude_bits(x) >= I32{} + 0x00800000));
#endif
}

CGX_HD bool any_below(I32 x, int32_t least) { return at_least(x, least) != (1u << kLanes) - 1; }

// x plus noise in [0, 1). The product is exact, so the result is rounded only once.
CGX_HD F32 add_uniform(F32 x, U32 noise) {
  const F32 bits = Lanes<F32>::to_float(noise >> 8);
#if defined(__AVX512F__)
  return (F32)_mm512_fmadd_ps((__m512)bits, _mm512_set1_ps(0x1p-24f), (__m512)x);
#else
  return x + bits * 0x1p-24f;
#endif
}

}  // namespace CGX_ISA
}  // namespace cgx

#endif  // CGX_CPU_MASKS_H_
