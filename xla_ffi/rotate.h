// The rotation of buckets on the CPU, and what else works on whole buckets of fp32 values.
// Included only by kernels_cpu.cc; everything lives in the instruction set's namespace.
#ifndef CGX_ROTATE_H_
#define CGX_ROTATE_H_

#include <string.h>

#include "buckets.h"

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

// The butterflies of a vector's lanes at a distance below kLanes.
CGX_HD F32 lane_butterflies(F32 v, uint32_t distance) {
  const U32 index = lane_index();
  const F32 other = __builtin_shuffle(v, (I32)(index ^ distance));
  return other + flip(v, (U32)((index & distance) != 0u) & 0x80000000u);
}

// Rows of 64 columns, which any vector divides.
template <bool kBack>
__attribute__((noinline)) void turn_usual(float* x, int64_t stride, int64_t first,
                                          const Rotation& rotation) {
  constexpr int kVectors = Rotation::kColumns / kLanes;
  U32 signs[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    signs[v] = rotation.signs(lane_index() + (uint32_t)(first + v * kLanes));
    F32 row[kRows];
#pragma GCC unroll 8
    for (uint32_t r = 0; r < kRows; ++r) {
      row[r] = load<F32>(x + r * stride + v * kLanes);
      if (!kBack) row[r] = flip(row[r], signs[v] << r) * rotation.forward;
    }
#pragma GCC unroll 3
    for (int h = 1; h < kRows; h *= 2) butterflies(row, kRows, h);
#pragma GCC unroll 8
    for (uint32_t r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (uint32_t h = 1; h < kLanes; h *= 2) row[r] = lane_butterflies(row[r], h);
      store(x + r * stride + v * kLanes, row[r]);
    }
  }
  for (uint32_t r = 0; r < kRows; ++r) {
    F32 column[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) column[v] = load<F32>(x + r * stride + v * kLanes);
#pragma GCC unroll 4
    for (int h = 1; h < kVectors; h *= 2) butterflies(column, kVectors, h);
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      if (kBack) column[v] = flip(column[v] * rotation.inverse, signs[v] << r);
      store(x + r * stride + v * kLanes, column[v]);
    }
  }
}

// Blocks of fewer columns: a leaf's last bucket, and unusual sizes.
template <bool kBack>
__attribute__((noinline)) void turn_narrow(float* x, int64_t stride, int64_t first,
                                           const Rotation& rotation) {
  const int columns = rotation.columns;
  for (int c = 0; c < columns; ++c) {
    const uint32_t signs = rotation.signs((uint32_t)(first + c));
    float row[kRows];
    for (int r = 0; r < kRows; ++r) {
      row[r] = x[r * stride + c];
      if (!kBack) row[r] = flip(row[r], signs << r) * rotation.forward;
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
      x[r * stride + c] = flip(x[r * stride + c] * rotation.inverse, signs << r);
    }
  }
}

template <bool kBack>
void turn(float* x, int64_t columns, const Rotation& rotation) {
  const bool usual = rotation.columns == Rotation::kColumns;
  for (int64_t first = 0; first < columns; first += rotation.columns) {
    usual ? turn_usual<kBack>(x + first, columns, first, rotation)
          : turn_narrow<kBack>(x + first, columns, first, rotation);
  }
}

void rotate_back(float* x, int64_t columns, const Rotation& rotation) {
  turn<true>(x, columns, rotation);
}

// A bucket's values, rotated, in whole columns.
template <typename Store>
__attribute__((noinline)) void read_rotated(const typename Store::Item* x, Record record,
                                            const Rotation& rotation, float* out) {
  const int64_t n = record.values, columns = record.columns();
  memset(out + n, 0, (kRows * columns - n) * sizeof(float));
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, Store::load_lanes(x + i));
  if (i < n) {
    typename Store::Item rest[kLanes] = {};
    for (int64_t l = 0; l < n - i; ++l) rest[l] = x[i + l];
    const F32 last = Store::load_lanes(rest);
    for (int64_t l = 0; l < n - i; ++l) out[i + l] = last[l];
  }
  turn<false>(out, columns, rotation);
}

// Turns `x` back, and writes the bucket's values times `factor`.
template <typename Store>
void write_rotated_back(float* x, Record record, const Rotation& rotation, float factor,
                        typename Store::Item* out) {
  rotate_back(x, record.columns(), rotation);
  scale_into<Store>(x, record.values, factor, out);
}

// The sum of (x * factor)^2 over a bucket in whole columns, in the order of the wire format: rows,
// then columns from afar, tile by tile.
__attribute__((noinline)) float sum_squares(const float* x, int64_t columns, float factor) {
  constexpr int kTile = Rotation::kColumns, kVectors = kTile / kLanes;
  float total = 0.0f;
  for (int64_t first = 0; first < columns; first += kTile) {
    const float* from = x + first;
    int64_t stride = columns;
    float edge[kRows * kTile];
    if (columns - first < kTile) {
      memset(edge, 0, sizeof(edge));
      for (int r = 0; r < kRows; ++r) {
        memcpy(edge + r * kTile, from + r * columns, (columns - first) * sizeof(float));
      }
      from = edge, stride = kTile;
    }
    F32 column[kVectors];
    for (int v = 0; v < kVectors; ++v) {
      F32 row[kRows];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        row[r] = load<F32>(from + r * stride + v * kLanes) * factor;
        row[r] *= row[r];
      }
      column[v] = ((row[0] + row[1]) + (row[2] + row[3])) + ((row[4] + row[5]) + (row[6] + row[7]));
    }
#pragma GCC unroll 4
    for (int h = kVectors / 2; h > 0; h /= 2) {
#pragma GCC unroll 8
      for (int v = 0; v < h; ++v) column[v] += column[v + h];
    }
    total += across<Add>(column[0]);
  }
  return total;
}

// (x + y) / divisor.
template <typename Store>
__attribute__((noinline)) void add_into(const typename Store::Item* x, const float* y, int64_t n,
                                        Divide divide, typename Store::Item* out) {
  const auto add = [&](const typename Store::Item* a, const float* b, typename Store::Item* to) {
    Store::store_lanes(to, canonical_nan(divide(Store::load_lanes(a) + load<F32>(b))));
  };
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) add(x + i, y + i, out + i);
  if (i == n) return;
  typename Store::Item a[kLanes] = {}, to[kLanes];
  float b[kLanes] = {};
  for (int64_t l = 0; l < n - i; ++l) a[l] = x[i + l], b[l] = y[i + l];
  add(a, b, to);
  for (int64_t l = 0; l < n - i; ++l) out[i + l] = to[l];
}

}  // namespace
}  // namespace CGX_ISA
}  // namespace cgx

#endif  // CGX_ROTATE_H_
