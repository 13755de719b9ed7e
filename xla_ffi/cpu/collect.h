// Finds values above a bound. Included only by cpu/codes.cc; everything lives in the instruction
// set's namespace.
#ifndef CGX_CPU_COLLECT_H_
#define CGX_CPU_COLLECT_H_

#include "cpu/masks.h"

namespace cgx {
inline namespace CGX_ISA {
namespace {

constexpr int kLaneBits = 16;

// Appends the lanes of a mask. Up to kLanes items after them are overwritten.
CGX_HD void append(uint32_t mask, int64_t first, const float* x, int64_t found, int32_t* at,
                   float* taken) {
#if defined(__AVX512F__)
  const __m512i places = _mm512_add_epi32((__m512i)lane_index(), _mm512_set1_epi32((int)first));
  _mm512_storeu_si512(at + found, _mm512_maskz_compress_epi32(mask, places));
  _mm512_storeu_ps(taken + found, _mm512_maskz_compress_ps(mask, _mm512_loadu_ps(x + first)));
#else
  for (; mask != 0; mask &= mask - 1, ++found) {
    const int64_t i = first + __builtin_ctz(mask);
    at[found] = (int32_t)i;
    taken[found] = x[i];
  }
#endif
}

int64_t collect(const float* x, int64_t from, int64_t to, uint32_t bits, int64_t room, int32_t* at,
                float* taken) {
  // Hits are too rare to expect and too frequent to mispredict each one. So vectors that hold any
  // hits are first noted without a branch; then the hits are read from the caches.
  constexpr int64_t kBlock = 2048;
  uint32_t noted[kBlock / kLanes];
  const int32_t least = (int32_t)bits;
  int64_t i = from, found = 0;
  for (; i + kLanes <= to && found <= room;) {
    const int64_t rest = to - i, block = rest < kBlock ? rest / kLanes * kLanes : kBlock;
    int64_t count = 0;
    for (int64_t j = 0; j < block; j += kLanes) {
      prefetch_l2<kLanes * 4>((const char*)(x + i + j) + kFarAhead);
      const uint32_t mask = at_least(magnitude_bits(load<F32>(x + i + j)), least);
      noted[count] = (uint32_t)j << kLaneBits | mask;
      count += mask != 0;
    }
    for (int64_t v = 0; v < count && found <= room; ++v) {
      const uint32_t mask = noted[v] & ((1u << kLaneBits) - 1);
      append(mask, i + (noted[v] >> kLaneBits), x, found, at, taken);
      found += __builtin_popcount(mask);
    }
    i += block;
  }
  for (; i < to && found <= room; ++i) {
    if ((int32_t)(bit_cast<uint32_t>(x[i]) & 0x7fffffffu) < least) continue;
    at[found] = (int32_t)i;
    taken[found++] = x[i];
  }
  return found;
}

}  // namespace
}  // namespace CGX_ISA
}  // namespace cgx

#endif  // CGX_CPU_COLLECT_H_
