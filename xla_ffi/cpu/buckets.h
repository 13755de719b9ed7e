// The kernels for one bucket: find its range, encode, sum and decode it, for one instruction set.
// Included only by cpu/kernels.cc; everything lives in the instruction set's namespace.
#ifndef CGX_CPU_BUCKETS_H_
#define CGX_CPU_BUCKETS_H_

#include <string.h>

#include "cpu/kernels.h"
#include "cpu/vector.h"

namespace cgx {
inline namespace CGX_ISA {
namespace {

constexpr int64_t kGroupValues = 1024;  // ranges of so many values first, then codes out of L1
constexpr int64_t kMaxGroup = kGroupValues / kTailValues;

// A pass that computes leaves the memory idle, and the processor's own prefetcher stops at page
// boundaries. So the kernels prefetch explicitly: into L2 far ahead, into L1 one group ahead.
constexpr int64_t kNearAhead = kGroupValues * 4;

// Columns of a full bucket of the default size. The loops below are compiled once for it, with
// every stride known and no edges, and once for any size (kColumns = 0).
constexpr int kUsualColumns = 64;
constexpr int64_t kUsualValues = kRows * kUsualColumns;
CGX_HD bool usual(Record record) { return record.values == kUsualValues; }

// Holds results in L1 until whole cache lines of them can be written past the caches.
template <int64_t kBytes>
struct Stage {
  alignas(kLine) uint8_t bytes[kBytes + kLine];

  // Where bytes for `to` are held: as far from the start of a cache line as `to` is.
  template <typename T>
  CGX_HD T* at(T* to) {
    return (T*)(bytes + (uintptr_t)to % kLine);
  }
  CGX_HD void store_nontemporal(void* target, int64_t size) const {
    uint8_t* const to = (uint8_t*)target;
    const uint8_t* const from = bytes + (uintptr_t)to % kLine;
    int64_t i = (kLine - (uintptr_t)to % kLine) % kLine;
    if (i > size) i = size;
    memcpy(to, from, i);
    for (; i + kLine <= size; i += kLine) store_line_nontemporal(to + i, from + i);
    memcpy(to + i, from + i, size - i);
  }
};

// kLanes columns of a bucket. At a bucket's edge some columns or row ends do not exist.
struct Tile {
  int64_t stride;  // columns of the bucket
  int64_t values;  // of the bucket
  int64_t column;  // the tile's first

  CGX_HD int64_t width() const { return stride - column < kLanes ? stride - column : kLanes; }
  CGX_HD int64_t first(int r) const { return r * stride + column; }
  CGX_HD bool full() const {
    return stride - column >= kLanes && first(kRows - 1) + kLanes <= values;
  }
  // How many values row r has in this tile.
  CGX_HD int64_t live(int r) const {
    const int64_t rest = values - first(r);
    return rest < 0 ? 0 : rest < width() ? rest : width();
  }
};

// Rows of kLanes values that stand in for a tile at a bucket's edge.
struct Edge {
  float row[kRows * kLanes];

  __attribute__((noinline)) void read(const float* bucket, const Tile& tile, float pad) {
    for (int r = 0; r < kRows; ++r) {
      const int64_t live = tile.live(r);
      for (int64_t i = 0; i < kLanes; ++i) {
        row[r * kLanes + i] = i < live ? bucket[tile.first(r) + i] : pad;
      }
    }
  }
  __attribute__((noinline)) void write(float* bucket, const Tile& tile) const {
    for (int r = 0; r < kRows; ++r) {
      const int64_t live = tile.live(r);
      for (int64_t i = 0; i < live; ++i) bucket[tile.first(r) + i] = row[r * kLanes + i];
    }
  }
};

// The same for the planes' bytes.
struct EdgeCodes {
  uint8_t plane[kMaxBits * kLanes];

  __attribute__((noinline)) void read(const uint8_t* planes, const Tile& tile, int bits) {
    for (int j = 0; j < bits; ++j) {
      for (int64_t i = 0; i < kLanes; ++i) {
        plane[j * kLanes + i] =
            i < tile.width() ? planes[j * tile.stride + tile.column + i] : uint8_t{0};
      }
    }
  }
  __attribute__((noinline)) void write(uint8_t* planes, const Tile& tile, int bits) const {
    for (int j = 0; j < bits; ++j) {
      for (int64_t i = 0; i < tile.width(); ++i) {
        planes[j * tile.stride + tile.column + i] = plane[j * kLanes + i];
      }
    }
  }
};

template <typename Store>
__attribute__((noinline)) bool all_finite(const typename Store::Item* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    typename Store::Item item[kLanes] = {x[i]};
    if ((bit_cast<U32>(Store::load_lanes(item))[0] & 0x7f800000u) == 0x7f800000u) return false;
  }
  return true;
}

struct Extremes {
  float min, max;
  bool finite;  // whether all values are finite

  CGX_HD Meta meta(int bits) const { return make_meta(min, max, finite, bits); }
};

// Collects extremes. The sum of the values detects a NaN or Inf for the price of one addition per
// value. Finite values may overflow the sum too; then all values are checked one by one.
struct Range {
  static constexpr int kChains = 4;
  F32 lo[kChains], hi[kChains], sum[kChains];

  CGX_HD Range() {
    const float inf = bit_cast<float>(0x7f800000u);
    for (int c = 0; c < kChains; ++c) lo[c] = F32{} + inf, hi[c] = F32{} - inf, sum[c] = F32{};
  }
  CGX_HD void add(int chain, F32 v) {
    add_extremes(chain, v);
    sum[chain % kChains] += v;
  }
  // For a value that can be NaN only if a value in the sum or an extreme is not finite.
  CGX_HD void add_extremes(int chain, F32 v) {
    const int c = chain % kChains;
    lo[c] = Lanes<F32>::lesser(lo[c], v);
    hi[c] = Lanes<F32>::greater(hi[c], v);
  }
  // The extremes of the n values at x, which have all been added.
  template <typename Store>
  CGX_HD Extremes extremes(const typename Store::Item* x, int64_t n) const {
    const float total = across<Add>((sum[0] + sum[1]) + (sum[2] + sum[3]));
    const float min = across<Min>(
        Lanes<F32>::lesser(Lanes<F32>::lesser(lo[0], lo[1]), Lanes<F32>::lesser(lo[2], lo[3])));
    const float max = across<Max>(
        Lanes<F32>::greater(Lanes<F32>::greater(hi[0], hi[1]), Lanes<F32>::greater(hi[2], hi[3])));
    const bool no_nan = (total <= kLargest && total >= -kLargest) || all_finite<Store>(x, n);
    return {min, max, no_nan && min >= -kLargest && max <= kLargest};
  }
};

template <typename Store, bool kFar>
__attribute__((noinline)) Extremes find_extremes(const typename Store::Item* x, int64_t n) {
  constexpr int kChains = Range::kChains;
  Range range;
  int64_t i = 0;
  for (; i + kChains * kLanes <= n; i += kChains * kLanes) {
    if (kFar) prefetch_l2<kChains * kLanes * sizeof(x[0])>((const char*)(x + i) + kFarAhead);
#pragma GCC unroll 4
    for (int c = 0; c < kChains; ++c) range.add(c, Store::load_lanes(x + i + c * kLanes));
  }
  for (; i < n; i += kLanes) {
    typename Store::Item item[kLanes];
    const int64_t live = n - i < kLanes ? n - i : kLanes;
    for (int l = 0; l < kLanes; ++l) item[l] = x[i + (l < live ? l : 0)];
    range.add(0, Store::load_lanes(item));
  }
  return range.extremes<Store>(x, n);
}

// How values become codes.
enum class Coding { kNearest, kClipped, kStochastic };

// The noise of one bucket's values.
struct Noise {
  NoiseSeed seed;
  float offset;
};

// How many quarters of the far memory the encoding of a bucket prefetches. Requests in one burst
// wait for each other, so a pass before the encoding that has time to spare prefetches the rest.
CGX_HD constexpr int64_t far_quarters(Coding coding) {
  return coding == Coding::kStochastic ? 4 : coding == Coding::kClipped ? 1 : 0;
}

// Where the memory begins that a bucket prefetches.
struct Ahead {
  const char* near;  // into L1
  const char* far;   // into L2
};

// Writes a record's planes and, with kResidual, the encoding errors.
template <int kBits, Coding kCoding, bool kResidual, int kColumns>
__attribute__((noinline)) void encode_bucket(const float* x, Record record, Meta meta, Noise noise,
                                             Ahead ahead, uint8_t* planes, float* residual) {
  constexpr bool kStochastic = kCoding == Coding::kStochastic;
  const int64_t columns = kColumns ? kColumns : record.columns();
  const bool poison = poisoned(meta);
  if (poison) memset(planes, 0, kBits * columns);
  if (poison && !kResidual) return;
  const float inverse = inverse_unit(meta);
  constexpr int64_t kTileBytes = kRows * kLanes * sizeof(*x);
  constexpr int64_t kQuarters = far_quarters(kCoding), kFarBytes = kQuarters * kTileBytes / 4;
  ahead.far += (4 - kQuarters) * columns / kLanes * kTileBytes / 4;
  for (int64_t column = 0; column < columns; column += kLanes) {
    prefetch_l1<kTileBytes>(ahead.near);
    prefetch_l2<kFarBytes>(ahead.far);
    ahead.near += kTileBytes;
    ahead.far += kFarBytes;
    const Tile tile{columns, record.values, column};
    const bool full = kColumns != 0 || tile.full();
    Edge edge;
    EdgeCodes edge_codes;
    if (!full) edge.read(x, tile, meta.lo);  // the padding's code is 0
    const float* const from = full ? x + column : edge.row;
    const int64_t stride = full ? columns : kLanes;
    F32 row[kRows];
    U32 code[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      row[r] = load<F32>(from + r * stride);
      if constexpr (kStochastic) {
        const U32 index = lane_index() + (uint32_t)tile.first(r);
        const F32 rounding = cgx::noise<F32>(index, noise.seed, noise.offset);
        code[r] = stochastic_code(row[r], meta.lo, inverse, rounding, kBits);
      } else if constexpr (kCoding == Coding::kClipped) {
        code[r] = clipped_code(row[r], meta.lo, inverse, kBits);
      } else {
        code[r] = nearest_code(row[r], meta.lo, inverse);
      }
    }
    if (!poison) {
      pack<kBits>(code, full ? planes + column : edge_codes.plane, stride);
      if (!full) edge_codes.write(planes, tile, kBits);
    }
    if constexpr (kResidual) {
      float* const to = full ? residual + column : edge.row;
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        store(to + r * stride, canonical_nan(row[r] - decode<F32>(code[r], meta)));
      }
      if (!full) edge.write(residual, tile);
    }
  }
}

// Writes (x + decoded records of the peers, in order, without `skip`) / divisor.
template <int kBits, int kColumns>
__attribute__((noinline)) void sum_bucket(const float* x, Record record, const uint8_t* records,
                                          int64_t peer_stride, int64_t peers, int64_t skip,
                                          Divide divide, const char* ahead, float* out) {
  const int64_t columns = kColumns ? kColumns : record.columns();
  for (int64_t column = 0; column < columns; column += kLanes) {
    const Tile tile{columns, record.values, column};
    const bool full = kColumns != 0 || tile.full();
    Edge edge;
    EdgeCodes edge_codes;
    if (!full) edge.read(x, tile, 0);
    const float* const from = full ? x + column : edge.row;
    const int64_t stride = full ? columns : kLanes;
    constexpr int64_t kTileBytes = kRows * kLanes * sizeof(*x);
    prefetch_l2<kTileBytes>(ahead + kFarAhead);
    ahead += kTileBytes;
    F32 row[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) row[r] = load<F32>(from + r * stride);
    for (int64_t peer = 0; peer < peers; ++peer) {
      if (peer == skip) continue;
      const uint8_t* const peer_record = records + peer * peer_stride;
      prefetch_l1<kBits * kLanes>((const char*)peer_record + kBits * column + kNearAhead / 2);
      const Meta meta = load<Header>(peer_record).meta();
      const uint8_t* const planes = Record::planes(peer_record);
      if (!full) edge_codes.read(planes, tile, kBits);
      U32 code[kRows];
      unpack<kBits>(full ? planes + column : edge_codes.plane, stride, code);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) row[r] += decode<F32>(code[r], meta);
    }
    float* const to = full ? out + column : edge.row;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) store(to + r * stride, canonical_nan(divide(row[r])));
    if (!full) edge.write(out, tile);
  }
}

template <int kBits, int kColumns>
__attribute__((noinline)) void decode_bucket(const uint8_t* from, Record record, float* out) {
  const int64_t columns = kColumns ? kColumns : record.columns();
  const Meta meta = checked(load<Header>(from).meta());
  const uint8_t* const planes = Record::planes(from);
  for (int64_t column = 0; column < columns; column += kLanes) {
    const Tile tile{columns, record.values, column};
    const bool full = kColumns != 0 || tile.full();
    Edge edge;
    EdgeCodes edge_codes;
    if (!full) edge_codes.read(planes, tile, kBits);
    float* const to = full ? out + column : edge.row;
    const int64_t stride = full ? columns : kLanes;
    U32 code[kRows];
    unpack<kBits>(full ? planes + column : edge_codes.plane, stride, code);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) store(to + r * stride, decode<F32>(code[r], meta));
    if (!full) edge.write(out, tile);
  }
}

}  // namespace
}  // namespace CGX_ISA
}  // namespace cgx

#endif  // CGX_CPU_BUCKETS_H_
