// The rotation of buckets on the CPU, and other functions for whole buckets of fp32 values.
// Included only by cpu/kernels.cc; everything lives in the instruction set's namespace.
#ifndef CGX_CPU_ROTATE_H_
#define CGX_CPU_ROTATE_H_

#include <string.h>

#include "cpu/units.h"

namespace cgx {
inline namespace CGX_ISA {
namespace {

// (a + b, a - b).
template <typename F>
CGX_HD void butterfly(F* a, F* b) {
  const F sum = *a + *b;
  *b = *a - *b;
  *a = sum;
}

template <typename F>
CGX_HD void butterflies(F* v, int count, int distance) {
#pragma GCC unroll 8
  for (int i = 0; i < count; ++i) {
    if ((i & distance) == 0) butterfly(&v[i], &v[i + distance]);
  }
}

// The butterflies between a vector's lanes at a distance below kLanes. A product with 1 or -1 is
// exact, so a fused multiply-add rounds like the sum or the difference.
CGX_HD F32 lane_butterflies(F32 v, uint32_t distance) {
  const U32 index = lane_index();
  const F32 other = __builtin_shuffle(v, (I32)(index ^ distance));
  const U32 minus = (U32)((index & distance) != 0u) & 0x80000000u;
#if defined(__AVX512F__)
  return (F32)_mm512_fmadd_ps((__m512)v, (__m512)flip(F32{} + 1.0f, minus), (__m512)other);
#elif defined(__FMA__)
  return (F32)_mm256_fmadd_ps((__m256)v, (__m256)flip(F32{} + 1.0f, minus), (__m256)other);
#else
  return other + flip(v, minus);
#endif
}

constexpr int kVectors = Rotation::kColumns / kLanes;  // of a row of a full block

// The butterflies within one vector of each row of a block: across the rows, then across the lanes.
CGX_HD void turn_vector(F32 (&row)[kRows], float* to, int64_t stride) {
#pragma GCC unroll 3
  for (int h = 1; h < kRows; h *= 2) butterflies(row, kRows, h);
#pragma GCC unroll 8
  for (uint32_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (uint32_t h = 1; h < kLanes; h *= 2) row[r] = lane_butterflies(row[r], h);
    store(to + r * stride, row[r]);
  }
}

// Does the butterflies across the vectors of each row of a block, then calls f(r, row).
template <typename F>
CGX_HD void turn_rows(const float* x, int64_t stride, F f) {
  for (uint32_t r = 0; r < kRows; ++r) {
    F32 column[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) column[v] = load<F32>(x + r * stride + v * kLanes);
#pragma GCC unroll 4
    for (int h = 1; h < kVectors; h *= 2) butterflies(column, kVectors, h);
    f(r, column);
  }
}

// A factor that applies a value's sign and its scale in one product.
CGX_HD F32 signed_scale(float scale, U32 signs) { return flip(F32{} + scale, signs); }

// The first half of a block's rotation, from `x` to `out`. With kUnits, `x` is multiplied by
// `factor` first. Prefetches kAhead bytes at `ahead`.
template <typename Store, int64_t kAhead, bool kUnits>
CGX_HD void turn_in(const typename Store::Item* x, const float* factor, float* out, int64_t stride,
                    int64_t first, const Rotation& rotation, const char* ahead) {
  U32 signs[kVectors];
#pragma GCC unroll 16
  for (int v = 0; v < kVectors; ++v) {
    signs[v] = rotation.signs(lane_index() + (uint32_t)(first + v * kLanes));
  }
#pragma GCC unroll 1
  for (int v = 0; v < kVectors; ++v) {
    prefetch_l2<kAhead / kVectors>(ahead + v * (kAhead / kVectors));
    F32 row[kRows];
#pragma GCC unroll 8
    for (uint32_t r = 0; r < kRows; ++r) {
      const int64_t i = r * stride + v * kLanes;
      F32 value = Store::load_lanes(x + i);
      if (kUnits) value *= load<F32>(factor + i);
      row[r] = value * signed_scale(rotation.forward, signs[v] << r);
    }
    turn_vector(row, out + v * kLanes, stride);
  }
}

// What is done with a value after it is rotated back.
enum class Finish {
  kAsIs,     // nothing: it is finite
  kLost,     // a NaN becomes the canonical one
  kDecoded,  // also, infinities become the largest floats: rounding made them
  kInUnits   // also, it is multiplied by its factor
};

// The second half of the inverse rotation, from `x` to `out`. Only kInUnits reads `factor`.
template <typename Store, Finish kFinish>
__attribute__((noinline)) void finish_back(const float* x, const float* factor, int64_t stride,
                                           int64_t first, const Rotation& rotation,
                                           typename Store::Item* out) {
  U32 signs[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    signs[v] = rotation.signs(lane_index() + (uint32_t)(first + v * kLanes));
  }
  turn_rows(x, stride, [&](uint32_t r, const F32(&row)[kVectors]) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      F32 value = flip(row[v], signs[v]);
      signs[v] <<= 1;
      const int64_t i = r * stride + v * kLanes;
      if (kFinish == Finish::kDecoded || kFinish == Finish::kInUnits) value = finite_or_nan(value);
      if (kFinish == Finish::kLost) value = canonical_nan(value);
      if (kFinish == Finish::kInUnits) {
        value = finite_of<Store>(value * load<F32>(factor + i));
      }
      Store::store_lanes(out + i, value);
    }
  });
}

// Rotates blocks of 64 columns, which the vectors of every instruction set divide.
__attribute__((noinline)) void turn_usual(float* x, int64_t stride, int64_t first,
                                          const Rotation& rotation) {
  turn_in<StoreF32, 0, false>(x, nullptr, x, stride, first, rotation, nullptr);
  turn_rows(x, stride, [&](uint32_t r, const F32(&row)[kVectors]) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) store(x + r * stride + v * kLanes, row[v]);
  });
}
__attribute__((noinline)) void turn_back_usual(float* x, int64_t stride, int64_t first,
                                               const Rotation& rotation) {
  for (int v = 0; v < kVectors; ++v) {
    F32 row[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      row[r] = load<F32>(x + r * stride + v * kLanes) * rotation.inverse;
    }
    turn_vector(row, x + v * kLanes, stride);
  }
  finish_back<StoreF32, Finish::kLost>(x, nullptr, stride, first, rotation, x);
}

// Rotates a bucket of the default size from `x` to `out` and returns its extremes. With kUnits, `x`
// is multiplied by `factor` first. Prefetches three quarters of the bucket at `ahead`; the clipped
// coding of encode_bucket prefetches the last.
template <typename Store, bool kUnits>
__attribute__((noinline)) Extremes rotate_usual(const typename Store::Item* x, const float* factor,
                                                const Rotation& rotation, const char* ahead,
                                                float* out) {
  constexpr int64_t kQuarter = kUsualValues * sizeof(*x) / 4, kRowAhead = 2 * kQuarter / kRows;
  turn_in<Store, kQuarter, kUnits>(x, factor, out, kUsualColumns, 0, rotation,
                                   ahead + 2 * kQuarter);
  Range range;
  turn_rows(out, kUsualColumns, [&](uint32_t r, const F32(&row)[kVectors]) {
    prefetch_l2<kRowAhead>(ahead + r * kRowAhead);
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      // Two stages carry any NaN or Inf into the first of four values, so only that one is added to
      // the sum. An Inf that these stages produce themselves shows up as an extreme.
      v < kVectors / 4 ? range.add(v, row[v]) : range.add_extremes(v, row[v]);
      store(out + r * kUsualColumns + v * kLanes, row[v]);
    }
  });
  return range.extremes<StoreF32>(out, kUsualValues);
}

// Whether a decoded bucket with this range stays finite when rotated back, whatever its codes are.
bool stays_finite(Meta meta, int bits, const Rotation& rotation) {
  const float limit = kLargest * rotation.forward / 2;
  const float last = meta.lo + meta.unit * (float)((1 << bits) - 1);
  return meta.lo > -limit && meta.lo < limit && last > -limit && last < limit;
}

// Decodes a bucket of the default size and does the first half of the inverse rotation.
template <int kBits>
__attribute__((noinline)) void decode_turned(const uint8_t* from, const Rotation& rotation,
                                             float* out) {
  const Meta meta = checked(load<Header>(from).meta());
  const uint8_t* const planes = Record::planes(from);
#pragma GCC unroll 1
  for (int v = 0; v < kVectors; ++v) {
    U32 code[kRows];
    unpack<kBits>(planes + v * kLanes, kUsualColumns, code);
    F32 row[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) row[r] = decode<F32>(code[r], meta) * rotation.inverse;
    turn_vector(row, out + v * kLanes, kUsualColumns);
  }
}

// Rotates blocks of fewer columns, which a leaf's last bucket and unusual bucket sizes have.
template <bool kBack>
__attribute__((noinline)) void turn_narrow(float* x, int64_t stride, int64_t first,
                                           const Rotation& rotation) {
  const int columns = rotation.columns;
  for (int c = 0; c < columns; ++c) {
    const uint32_t signs = rotation.signs((uint32_t)(first + c));
    float row[kRows];
    for (int r = 0; r < kRows; ++r) {
      row[r] = x[r * stride + c];
      row[r] = kBack ? row[r] * rotation.inverse : flip(row[r], signs << r) * rotation.forward;
    }
    for (int h = 1; h < kRows; h *= 2) butterflies(row, kRows, h);
    for (int r = 0; r < kRows; ++r) x[r * stride + c] = row[r];
  }
  for (int r = 0; r < kRows; ++r) {
    for (int h = 1; h < columns; h *= 2) butterflies(x + r * stride, columns, h);
  }
  for (int c = 0; kBack && c < columns; ++c) {
    const uint32_t signs = rotation.signs((uint32_t)(first + c));
    for (int r = 0; r < kRows; ++r) {
      x[r * stride + c] = flip(x[r * stride + c], signs << r);
    }
  }
}

template <bool kBack>
void turn(float* x, int64_t columns, const Rotation& rotation) {
  const bool usual = rotation.columns == Rotation::kColumns;
  for (int64_t first = 0; first < columns; first += rotation.columns) {
    if (!usual) {
      turn_narrow<kBack>(x + first, columns, first, rotation);
    } else if (kBack) {
      turn_back_usual(x + first, columns, first, rotation);
    } else {
      turn_usual(x + first, columns, first, rotation);
    }
  }
}

void rotate_back(float* x, int64_t columns, const Rotation& rotation) {
  turn<true>(x, columns, rotation);
}

// Pads a bucket's values with zeros to whole columns, and rotates them.
void rotate(float* x, Record record, const Rotation& rotation) {
  const int64_t n = record.values, columns = record.columns();
  memset(x + n, 0, (kRows * columns - n) * sizeof(float));
  turn<false>(x, columns, rotation);
}

// The sum of (x * factor)^2 over a bucket that is one block, in the order of the wire format:
// across the rows, then across the columns, the most distant ones first.
__attribute__((noinline)) float sum_squares(const float* x, int columns, float factor) {
  float edge[kRows * Rotation::kColumns];
  int64_t stride = columns;
  if (columns < Rotation::kColumns) {
    stride = Rotation::kColumns;
    memset(edge, 0, sizeof(edge));
    for (int r = 0; r < kRows; ++r) {
      memcpy(edge + r * stride, x + r * columns, columns * sizeof(float));
    }
    x = edge;
  }
  F32 column[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    F32 row[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      row[r] = load<F32>(x + r * stride + v * kLanes) * factor;
      row[r] *= row[r];
    }
    column[v] = ((row[0] + row[1]) + (row[2] + row[3])) + ((row[4] + row[5]) + (row[6] + row[7]));
  }
#pragma GCC unroll 4
  for (int h = kVectors / 2; h > 0; h /= 2) {
#pragma GCC unroll 8
    for (int v = 0; v < h; ++v) column[v] += column[v + h];
  }
  return across<Add>(column[0]);
}

// Writes x / divisor.
template <typename Store>
__attribute__((noinline)) void write_quotients(const float* x, int64_t n, Divide divide,
                                               typename Store::Item* out) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Store::store_lanes(out + i, canonical_nan(divide(load<F32>(x + i))));
  }
  if (i == n) return;
  store_part<Store>(out + i, canonical_nan(divide(load_part<StoreF32>(x + i, n - i))), n - i);
}

// Writes (x + y) / divisor.
template <typename Store>
__attribute__((noinline)) void add_into(const typename Store::Item* x, const float* y, int64_t n,
                                        Divide divide, typename Store::Item* out) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const F32 sum = Store::load_lanes(x + i) + load<F32>(y + i);
    Store::store_lanes(out + i, canonical_nan(divide(sum)));
  }
  if (i == n) return;
  const F32 last = load_part<Store>(x + i, n - i) + load_part<StoreF32>(y + i, n - i);
  store_part<Store>(out + i, canonical_nan(divide(last)), n - i);
}

}  // namespace
}  // namespace CGX_ISA
}  // namespace cgx

#endif  // CGX_CPU_ROTATE_H_
