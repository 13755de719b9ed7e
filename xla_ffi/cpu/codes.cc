// Compiled once for each instruction set. The rules of kernels.cc apply here too.
#include <string.h>

#include "cpu/bucket_top_k.h"
#include "cpu/kernels.h"
#include "cpu/levels.h"
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

extern const CodeKernels kCodes;
const CodeKernels kCodes = {pack_signs, unpack_signs, collect, encode_buckets, largest_of_buckets};

}  // namespace CGX_ISA
}  // namespace cgx
