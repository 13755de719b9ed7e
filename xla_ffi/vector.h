// Vectors of one instruction set: loads, stores, dtype conversions and code planes.
// Included only by kernels_cpu.cc; everything lives in the instruction set's namespace.
#ifndef CGX_VECTOR_H_
#define CGX_VECTOR_H_

#include "quantize.h"

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
typedef uint16_t U16 __attribute__((vector_size(2 * kLanes)));
typedef uint8_t U8 __attribute__((vector_size(kLanes)));

template <>
struct Lanes<F32> {
  using U = U32;
  CGX_HD static U32 truncate(F32 x) { return (U32)__builtin_convertvector(x, I32); }
  CGX_HD static F32 to_float(U32 x) { return __builtin_convertvector((I32)x, F32); }
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

CGX_HD U32 lane_index() {
  U32 index;
  for (int i = 0; i < kLanes; ++i) index[i] = i;
  return index;
}

// Storage types of leaves: `load`/`store` move kLanes values as fp32.
struct StoreF32 {
  using Item = float;
  CGX_HD static Item item(float x) { return x; }
  CGX_HD static F32 load_lanes(const Item* from) { return load<F32>(from); }
  CGX_HD static void store_lanes(Item* to, F32 x) { store(to, x); }
};
struct StoreBF16 {
  using Item = uint16_t;
  CGX_HD static Item item(float x) { return (Item)narrow_bf16(x); }
  CGX_HD static F32 load_lanes(const Item* from) {
    return widen_bf16<F32>(__builtin_convertvector(load<U16>(from), U32));
  }
  CGX_HD static void store_lanes(Item* to, F32 x) {
    store(to, __builtin_convertvector(narrow_bf16(x), U16));
  }
};
struct StoreF16 {
  using Item = uint16_t;
  CGX_HD static Item item(float x) { return (Item)narrow_f16(x); }
  CGX_HD static F32 load_lanes(const Item* from) {
    return widen_f16<F32>(__builtin_convertvector(load<U16>(from), U32));
  }
  CGX_HD static void store_lanes(Item* to, F32 x) {
    store(to, __builtin_convertvector(narrow_f16(x), U16));
  }
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
    store(planes + j * stride, __builtin_convertvector(plane, U8));
  }
}

template <int kBits>
CGX_HD void unpack(const uint8_t* planes, int64_t stride, U32 (&code)[kRows]) {
  U32 plane[kBits];
#pragma GCC unroll 8
  for (int j = 0; j < kBits; ++j) {
    plane[j] = __builtin_convertvector(load<U8>(planes + j * stride), U32);
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    const int j = r * kBits / 8, shift = r * kBits % 8;
    U32 bits = plane[j] >> shift;
    if (shift + kBits > 8) bits |= plane[j + 1 < kBits ? j + 1 : j] << (8 - shift);
    code[r] = bits & ((1u << kBits) - 1);
  }
}

// Min and max keep `a` when b is NaN, as vminps does.
CGX_HD F32 min_of(F32 a, F32 b) { return b < a ? b : a; }
CGX_HD F32 max_of(F32 a, F32 b) { return b > a ? b : a; }

struct Add {
  CGX_HD static F32 of(F32 a, F32 b) { return a + b; }
};
struct Min {
  CGX_HD static F32 of(F32 a, F32 b) { return min_of(a, b); }
};
struct Max {
  CGX_HD static F32 of(F32 a, F32 b) { return max_of(a, b); }
};

// One value from all lanes.
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

#endif  // CGX_VECTOR_H_
