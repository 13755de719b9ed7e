// Vectors of one instruction set: loads, stores, dtype conversions and code planes.
// Included only by cpu/kernels.cc and cpu/codes.cc; everything lives in the instruction set's
// namespace.
#ifndef CGX_CPU_VECTOR_H_
#define CGX_CPU_VECTOR_H_

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "format/quantize.h"

namespace cgx {
inline namespace CGX_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float F32 __attribute__((vector_size(4 * kLanes)));
typedef int32_t I32 __attribute__((vector_size(4 * kLanes)));
typedef uint32_t U32 __attribute__((vector_size(4 * kLanes)));

template <>
struct Lanes<F32> {
  using U = U32;
  CGX_HD static U32 truncate(F32 x) { return (U32) __builtin_convertvector(x, I32); }
  CGX_HD static F32 to_float(U32 x) { return __builtin_convertvector((I32)x, F32); }
  // `a` where b is NaN. Uses intrinsics because GCC 12 compares and blends if one of the two is a
  // constant.
#if defined(__AVX512F__)
  CGX_HD static F32 lesser(F32 a, F32 b) { return (F32)_mm512_min_ps((__m512)b, (__m512)a); }
  CGX_HD static F32 greater(F32 a, F32 b) { return (F32)_mm512_max_ps((__m512)b, (__m512)a); }
#elif defined(__AVX2__)
  CGX_HD static F32 lesser(F32 a, F32 b) { return (F32)_mm256_min_ps((__m256)b, (__m256)a); }
  CGX_HD static F32 greater(F32 a, F32 b) { return (F32)_mm256_max_ps((__m256)b, (__m256)a); }
#elif defined(__x86_64__)
  CGX_HD static F32 lesser(F32 a, F32 b) { return (F32)_mm_min_ps((__m128)b, (__m128)a); }
  CGX_HD static F32 greater(F32 a, F32 b) { return (F32)_mm_max_ps((__m128)b, (__m128)a); }
#else
  CGX_HD static F32 lesser(F32 a, F32 b) { return b < a ? b : a; }
  CGX_HD static F32 greater(F32 a, F32 b) { return b > a ? b : a; }
#endif
};

template <typename V>
CGX_HD V load(const void* from) {
  V v;
  memcpy(&v, from, sizeof(V));
  return v;
}

template <typename V>
CGX_HD void store(void* to, const V& v) {
  memcpy(to, &v, sizeof(V));
}

constexpr int64_t kLine = 64;         // bytes of a cache line
constexpr int64_t kFarAhead = 32768;  // bytes

// Prefetches kBytes of memory, which need not exist: into L1, or only into L2.
template <int64_t kBytes>
CGX_HD void prefetch_l1(const char* from) {
#pragma GCC unroll 16
  for (int64_t i = 0; i < kBytes; i += kLine) __builtin_prefetch(from + i, 0, 3);
}
template <int64_t kBytes>
CGX_HD void prefetch_l2(const char* from) {
#pragma GCC unroll 16
  for (int64_t i = 0; i < kBytes; i += kLine) __builtin_prefetch(from + i, 0, 2);
}

// Writes an aligned cache line past the caches. Other threads see it after end_nontemporal().
CGX_HD void store_line_nontemporal(void* to, const void* from) {
#pragma GCC unroll 4
  for (int64_t i = 0; i < kLine; i += sizeof(F32)) {
    const F32 v = load<F32>((const char*)from + i);
    float* const at = (float*)((char*)to + i);
#if defined(__AVX512F__)
    _mm512_stream_ps(at, (__m512)v);
#elif defined(__AVX2__)
    _mm256_stream_ps(at, (__m256)v);
#elif defined(__x86_64__)
    _mm_stream_ps(at, (__m128)v);
#else
    store(at, v);
#endif
  }
}
CGX_HD void end_nontemporal() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

CGX_HD U32 lane_index() {
  U32 index;
  for (int i = 0; i < kLanes; ++i) index[i] = i;
  return index;
}

// Convert kLanes bytes or 16-bit words of memory to 32-bit lanes and back, keeping the low bits.
// Use intrinsics because GCC 12 converts these vectors one lane at a time.
#if defined(__AVX512F__)
CGX_HD U32 load_u8(const void* from) {
  return (U32)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
}
CGX_HD U32 load_u16(const void* from) {
  return (U32)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
}
CGX_HD void store_u8(void* to, U32 x) {
  _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)x));
}
CGX_HD void store_u16(void* to, U32 x) {
  _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16((__m512i)x));
}
#elif defined(__AVX2__)
CGX_HD U32 load_u8(const void* from) {
  return (U32)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
}
CGX_HD U32 load_u16(const void* from) {
  return (U32)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
}
CGX_HD __m128i low_u16(U32 x) {  // lanes below 2^16
  return _mm_packus_epi32(_mm256_castsi256_si128((__m256i)x),
                          _mm256_extracti128_si256((__m256i)x, 1));
}
CGX_HD void store_u8(void* to, U32 x) {
  const __m128i words = low_u16(x & 0xffu);
  _mm_storel_epi64((__m128i*)to, _mm_packus_epi16(words, words));
}
CGX_HD void store_u16(void* to, U32 x) { _mm_storeu_si128((__m128i*)to, low_u16(x & 0xffffu)); }
#elif defined(__x86_64__)
CGX_HD U32 load_u8(const void* from) {
  const __m128i zero = _mm_setzero_si128(), bytes = _mm_cvtsi32_si128(load<int32_t>(from));
  return (U32)_mm_unpacklo_epi16(_mm_unpacklo_epi8(bytes, zero), zero);
}
CGX_HD U32 load_u16(const void* from) {
  return (U32)_mm_unpacklo_epi16(_mm_loadl_epi64((const __m128i*)from), _mm_setzero_si128());
}
CGX_HD __m128i low_u16(U32 x) {  // SSE2 packs with signed saturation only: sign-extend first
  const __m128i words = _mm_srai_epi32(_mm_slli_epi32((__m128i)x, 16), 16);
  return _mm_packs_epi32(words, words);
}
CGX_HD void store_u8(void* to, U32 x) {
  const __m128i words = low_u16(x & 0xffu);
  store(to, _mm_cvtsi128_si32(_mm_packus_epi16(words, words)));
}
CGX_HD void store_u16(void* to, U32 x) { _mm_storel_epi64((__m128i*)to, low_u16(x)); }
#else
typedef uint16_t U16 __attribute__((vector_size(2 * kLanes)));
typedef uint8_t U8 __attribute__((vector_size(kLanes)));
CGX_HD U32 load_u8(const void* from) { return __builtin_convertvector(load<U8>(from), U32); }
CGX_HD U32 load_u16(const void* from) { return __builtin_convertvector(load<U16>(from), U32); }
CGX_HD void store_u8(void* to, U32 x) { store(to, __builtin_convertvector(x, U8)); }
CGX_HD void store_u16(void* to, U32 x) { store(to, __builtin_convertvector(x, U16)); }
#endif

// Storage types of leaves. load_lanes and store_lanes move kLanes values as fp32. kMost is the
// largest finite value.
struct StoreF32 {
  using Item = float;
  static constexpr float kMost = kLargest;
  CGX_HD static F32 load_lanes(const Item* from) { return load<F32>(from); }
  CGX_HD static void store_lanes(Item* to, F32 x) { store(to, x); }
};
struct StoreBF16 {
  using Item = uint16_t;
  static constexpr float kMost = 3.38953139e+38f;
  CGX_HD static F32 load_lanes(const Item* from) { return widen_bf16<F32>(load_u16(from)); }
  CGX_HD static void store_lanes(Item* to, F32 x) { store_u16(to, narrow_bf16(x)); }
};
struct StoreF16 {
  using Item = uint16_t;
  static constexpr float kMost = 65504.0f;
  CGX_HD static F32 load_lanes(const Item* from) { return widen_f16<F32>(load_u16(from)); }
  CGX_HD static void store_lanes(Item* to, F32 x) { store_u16(to, narrow_f16(x)); }
};

// Writes kLanes columns of every plane: byte j of sum_r code[r] << (r * kBits).
template <int kBits>
CGX_HD void pack(const U32 (&code)[kRows], uint8_t* planes, int64_t stride) {
#pragma GCC unroll 8
  for (int j = 0; j < kBits; ++j) {
    U32 plane = {};
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const int shift = r * kBits - 8 * j;
      if (shift >= 0 && shift < 8) plane |= code[r] << shift;
      if (shift < 0 && shift > -kBits) plane |= code[r] >> -shift;
    }
    store_u8(planes + j * stride, plane);
  }
}

template <int kBits>
CGX_HD void unpack(const uint8_t* planes, int64_t stride, U32 (&code)[kRows]) {
  U32 plane[kBits];
#pragma GCC unroll 8
  for (int j = 0; j < kBits; ++j) {
    plane[j] = load_u8(planes + j * stride);
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const int j = r * kBits / 8, shift = r * kBits % 8;
    U32 bits = plane[j] >> shift;
    if (shift + kBits > 8) bits |= plane[j + 1 < kBits ? j + 1 : j] << (8 - shift);
    code[r] = bits & ((1u << kBits) - 1);
  }
}

// x with its sign changed where bit 31 of `sign` is set.
CGX_HD F32 flip(F32 x, U32 sign) {
#if defined(__AVX512F__)
  constexpr int kXorOfAnd = 0x78;
  const __m512i mask = _mm512_set1_epi32((int)0x80000000u);
  return (F32)_mm512_ternarylogic_epi32((__m512i)x, (__m512i)sign, mask, kXorOfAnd);
#else
  return (F32)((U32)x ^ (sign & 0x80000000u));
#endif
}

// Replaces infinities by the largest floats, and NaNs by the canonical one.
CGX_HD F32 finite_or_nan(F32 x) {
#if defined(__AVX512F__)
  const __m512i most = _mm512_set1_epi32(0x11ef1100);  // by the class of x: NaN, ... -inf, inf, ...
  const __m512 nan = _mm512_castsi512_ps(_mm512_set1_epi32((int)kQuietNan));
  return (F32)_mm512_fixupimm_ps(nan, (__m512)x, most, 0);
#else
  const F32 most = F32{} + kLargest;
  return canonical_nan(Lanes<F32>::greater(Lanes<F32>::lesser(x, most), -most));
#endif
}

struct Add {
  CGX_HD static F32 of(F32 a, F32 b) { return a + b; }
};
struct Min {
  CGX_HD static F32 of(F32 a, F32 b) { return Lanes<F32>::lesser(a, b); }
};
struct Max {
  CGX_HD static F32 of(F32 a, F32 b) { return Lanes<F32>::greater(a, b); }
};

// Reduces all lanes to one value.
template <typename Op>
CGX_HD float across(F32 v) {
#pragma GCC unroll 4
  for (uint32_t step = kLanes / 2; step > 0; step /= 2) {
    v = Op::of(v, __builtin_shuffle(v, (I32)((lane_index() + step) & (kLanes - 1u))));
  }
  return v[0];
}

}  // namespace CGX_ISA
}  // namespace cgx

#endif  // CGX_CPU_VECTOR_H_
