// Clipped codes of a bucket of the default size, for processors that narrow with saturation.
// Included only by cpu/kernels.cc; everything lives in the instruction set's namespace.
#ifndef CGX_CPU_CLIPPED_H_
#define CGX_CPU_CLIPPED_H_

#include "cpu/buckets.h"

namespace cgx {
inline namespace CGX_ISA {
namespace {

#if defined(__x86_64__)
// Whether scaled levels fit an int32. From two bits on, a clipped range is a good part of the root
// mean square. At one bit it may be far smaller.
constexpr bool saturates(int bits) { return bits > 1; }

// The lanes of four vectors as bytes, saturated to [0, 255]. byte_order() restores their order.
CGX_HD U32 saturated_bytes(const I32 (&x)[4]) {
#if defined(__AVX512F__)
  return (U32)_mm512_packus_epi16(_mm512_packs_epi32((__m512i)x[0], (__m512i)x[1]),
                                  _mm512_packs_epi32((__m512i)x[2], (__m512i)x[3]));
#elif defined(__AVX2__)
  return (U32)_mm256_packus_epi16(_mm256_packs_epi32((__m256i)x[0], (__m256i)x[1]),
                                  _mm256_packs_epi32((__m256i)x[2], (__m256i)x[3]));
#else
  return (U32)_mm_packus_epi16(_mm_packs_epi32((__m128i)x[0], (__m128i)x[1]),
                               _mm_packs_epi32((__m128i)x[2], (__m128i)x[3]));
#endif
}
CGX_HD U32 byte_order(U32 bytes) {
  constexpr uint32_t kParts = kLanes / 4;  // of 128 bits, each with four bytes of every vector
  const U32 lane = lane_index();
  return __builtin_shuffle(bytes, (I32)(lane % kParts * 4u + lane / kParts));
}

// x * scale + scale / 2 with one rounding; `scale` is a power of two.
CGX_HD F32 scaled_level(F32 x, float scale) {
#if defined(__AVX512F__)
  return (F32)_mm512_fmadd_ps((__m512)x, _mm512_set1_ps(scale), _mm512_set1_ps(scale / 2));
#elif defined(__FMA__)
  return (F32)_mm256_fmadd_ps((__m256)x, _mm256_set1_ps(scale), _mm256_set1_ps(scale / 2));
#else
  return x * scale + scale / 2;
#endif
}

// Writes the same planes as encode_bucket. A level is scaled so that its code is the upper bits of
// a byte, and narrowing to a byte clips it. Each row is a vector of bytes, from which the planes
// take their bits.
template <int kBits>
__attribute__((noinline)) void encode_clipped(const float* x, Meta meta, Ahead ahead,
                                              uint8_t* planes) {
  constexpr int64_t kWidth = 4 * kLanes, kBytes = kWidth * sizeof(*x);
  constexpr int64_t kFarBytes = kBytes * far_quarters(Coding::kClipped) / 4, kPair = 2 * kLine;
  const float inverse = inverse_unit(meta);
  ahead.far += kUsualValues * sizeof(*x) - kUsualColumns / kWidth * kRows * kFarBytes;
#pragma GCC unroll 1
  for (int64_t column = 0; column < kUsualColumns; column += kWidth) {
    U32 plane[kBits] = {};
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      prefetch_l1<kBytes>(ahead.near + r * kBytes);
      if (r * kFarBytes % kPair == 0) prefetch_l2<kPair>(ahead.far + r * kFarBytes);
      __asm__ volatile("" ::: "memory");  // keeps the compiler from moving all prefetches up
      I32 level[4];
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        const F32 value = load<F32>(x + r * kUsualColumns + column + v * kLanes);
        const F32 scaled = scaled_level((value - meta.lo) * inverse, 1 << (8 - kBits));
        level[v] = (I32)Lanes<F32>::truncate(scaled);
      }
      const U32 code = saturated_bytes(level);
#pragma GCC unroll 8
      for (int j = 0; j < kBits; ++j) {
        const int first = r * kBits - 8 * j, last = first + kBits;
        if (last <= 0 || first >= 8) continue;
        const uint32_t mask = (1u << (last < 8 ? last : 8)) - (1u << (first > 0 ? first : 0));
        const U32 bits = last < 8 ? code >> (8 - last) : code << (last - 8);
        plane[j] |= bits & (mask * 0x01010101u);
      }
    }
#pragma GCC unroll 8
    for (int j = 0; j < kBits; ++j)
      store(planes + j * kUsualColumns + column, byte_order(plane[j]));
    ahead.near += kRows * kBytes;
    ahead.far += kRows * kFarBytes;
  }
}
#else
constexpr bool saturates(int) { return false; }
#endif

}  // namespace
}  // namespace CGX_ISA
}  // namespace cgx

#endif  // CGX_CPU_CLIPPED_H_
