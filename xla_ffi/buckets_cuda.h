// How a warp reads, sums, encodes and decodes one bucket; included only by kernels_cuda.cu.
//
// One warp works on one bucket at a time. It sees the bucket as the wire format does, 8 rows of
// columns, in tiles of 64 columns: the lower half of the warp holds rows 0 to 3, the upper half
// rows 4 to 7, every lane 4 rows by 4 columns. So values are read and written 16 bytes a lane (8
// for 16-bit dtypes), a lane's codes of a column make the low or the high half of the column's
// number, and its bytes of a plane make one 32-bit word. Only at odd widths do the two halves meet
// in one byte.
//
// Ranges and codes come from the functions that the CPU kernels use, so the bytes are the same;
// compile with -fmad=false. No shared memory: what lanes tell each other goes through registers.
#ifndef CGX_BUCKETS_CUDA_H_
#define CGX_BUCKETS_CUDA_H_

#include <cuda_runtime.h>

#include "kernels_cuda.h"
#include "quantize.h"
#include "wire_format.h"

namespace cgx {
namespace {

constexpr int kWarp = 32;
constexpr unsigned kEveryLane = 0xffffffffu;
constexpr int kHalfRows = kRows / 2;
constexpr int kColumns = 4;  // of a lane
constexpr int kTileColumns = kWarp / 2 * kColumns;
static_assert(kTileValues == kRows * kTileColumns, "the header tells what a tile holds");

struct Lane {
  int index;
  int half;  // 0: rows 0 to 3, 1: rows 4 to 7
  int column;

  __device__ Lane()
      : index(threadIdx.x % kWarp),
        half(index / (kWarp / 2)),
        column(index % (kWarp / 2) * kColumns) {}
};

// A lane's part of a tile.
struct Tile {
  float v[kHalfRows][kColumns];
};

// A bucket as a lane sees it. It has 2^30 values at most, so places in it are 32-bit.
struct Bucket {
  int values;
  int columns;
  int bits;
  DType dtype;
  bool aligned;
  Lane lane;

  __device__ Bucket(const Piece& piece, int64_t number)
      : bits(piece.bits), dtype(piece.dtype), aligned(piece.aligned) {
    const int64_t rest = piece.values - number * piece.unit;
    values = rest < piece.unit ? static_cast<int>(rest) : piece.unit;
    columns = static_cast<int>(Record{values, bits}.columns());
  }
  __device__ int tiles() const { return (columns + kTileColumns - 1) / kTileColumns; }
  __device__ int column(int tile) const { return tile * kTileColumns + lane.column; }
  // Index in the bucket of the first of this lane's values in row r of its half.
  __device__ int index(int tile, int r) const {
    return (lane.half * kHalfRows + r) * columns + column(tile);
  }
  // Whether some of its rows end early: only a leaf's last bucket.
  __device__ bool ragged() const { return values != kRows * columns; }
};

__device__ float load_item(const char* values, int i, DType dtype) {
  if (dtype == DType::kF32) return reinterpret_cast<const float*>(values)[i];
  const uint32_t half = reinterpret_cast<const uint16_t*>(values)[i];
  return dtype == DType::kBF16 ? widen_bf16<float>(half) : widen_f16<float>(half);
}

__device__ uint32_t narrow(float x, DType dtype) {
  return dtype == DType::kBF16 ? narrow_bf16<float>(x) : narrow_f16<float>(x);
}

__device__ void store_item(char* values, int i, DType dtype, float x) {
  if (dtype == DType::kF32) {
    reinterpret_cast<float*>(values)[i] = x;
  } else {
    reinterpret_cast<uint16_t*>(values)[i] = static_cast<uint16_t>(narrow(x, dtype));
  }
}

// Reads this lane's part; values that do not exist are `pad`.
__device__ Tile load_tile(const Bucket& bucket, const char* values, int tile, float pad) {
  Tile t;
  const bool here = bucket.column(tile) < bucket.columns;
  if (here && bucket.aligned && !bucket.ragged()) {
    if (bucket.dtype == DType::kF32) {
#pragma unroll
      for (int r = 0; r < kHalfRows; ++r) {
        const float4 x = *reinterpret_cast<const float4*>(reinterpret_cast<const float*>(values) +
                                                          bucket.index(tile, r));
        t.v[r][0] = x.x, t.v[r][1] = x.y, t.v[r][2] = x.z, t.v[r][3] = x.w;
      }
      return t;
    }
    uint2 x[kHalfRows];
#pragma unroll
    for (int r = 0; r < kHalfRows; ++r) {
      x[r] = *reinterpret_cast<const uint2*>(reinterpret_cast<const uint16_t*>(values) +
                                             bucket.index(tile, r));
    }
#pragma unroll
    for (int r = 0; r < kHalfRows; ++r) {
      const uint32_t item[kColumns] = {x[r].x & 0xffffu, x[r].x >> 16, x[r].y & 0xffffu,
                                       x[r].y >> 16};
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        t.v[r][c] =
            bucket.dtype == DType::kBF16 ? widen_bf16<float>(item[c]) : widen_f16<float>(item[c]);
      }
    }
    return t;
  }
#pragma unroll
  for (int r = 0; r < kHalfRows; ++r) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int i = bucket.index(tile, r) + c;
      t.v[r][c] = here && i < bucket.values ? load_item(values, i, bucket.dtype) : pad;
    }
  }
  return t;
}

__device__ void store_tile(const Bucket& bucket, char* values, int tile, const Tile& t) {
  if (bucket.column(tile) >= bucket.columns) return;
  if (!bucket.aligned || bucket.ragged()) {
#pragma unroll
    for (int r = 0; r < kHalfRows; ++r) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int i = bucket.index(tile, r) + c;
        if (i < bucket.values) store_item(values, i, bucket.dtype, t.v[r][c]);
      }
    }
    return;
  }
#pragma unroll
  for (int r = 0; r < kHalfRows; ++r) {
    const int i = bucket.index(tile, r);
    if (bucket.dtype == DType::kF32) {
      *reinterpret_cast<float4*>(reinterpret_cast<float*>(values) + i) =
          make_float4(t.v[r][0], t.v[r][1], t.v[r][2], t.v[r][3]);
    } else {
      uint32_t item[kColumns];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) item[c] = narrow(t.v[r][c], bucket.dtype);
      *reinterpret_cast<uint2*>(reinterpret_cast<uint16_t*>(values) + i) =
          make_uint2(item[0] | item[1] << 16, item[2] | item[3] << 16);
    }
  }
}

// Bytes of four words, transposed: byte k of word j becomes byte j of word k.
__device__ void transpose_bytes(uint32_t (&w)[kColumns]) {
  const uint32_t low01 = __byte_perm(w[0], w[1], 0x5140), low23 = __byte_perm(w[2], w[3], 0x5140);
  const uint32_t high01 = __byte_perm(w[0], w[1], 0x7362), high23 = __byte_perm(w[2], w[3], 0x7362);
  w[0] = __byte_perm(low01, low23, 0x5410);
  w[1] = __byte_perm(low01, low23, 0x7632);
  w[2] = __byte_perm(high01, high23, 0x5410);
  w[3] = __byte_perm(high01, high23, 0x7632);
}

// The planes that a half's bits lie in. At an odd width the halves share the middle one.
struct Planes {
  int first, last;
  int shift;  // where the half's first bit lies in its first plane

  __device__ Planes(int bits, int half)
      : first(half ? bits / 2 : 0),
        last(half ? bits : (bits + 1) / 2),
        shift(half * (bits & 1) * 4) {}
};

// A lane's codes: for each of its columns the number that its four rows make.
struct Codes {
  uint32_t number[kColumns] = {};

  __device__ void set(int r, int c, int bits, uint32_t code) { number[c] |= code << (r * bits); }
  __device__ uint32_t get(int r, int c, int bits) const {
    return number[c] >> (r * bits) & ((1u << bits) - 1u);
  }
};

__device__ void store_codes(const Bucket& bucket, uint8_t* planes, int tile, Codes codes) {
  const Planes mine(bucket.bits, bucket.lane.half);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) codes.number[c] <<= mine.shift;
  transpose_bytes(codes.number);
  const bool odd = bucket.bits & 1;
  const uint32_t shared = __shfl_xor_sync(kEveryLane, codes.number[0], kWarp / 2);
  if (bucket.column(tile) >= bucket.columns) return;
#pragma unroll
  for (int k = 0; k < kColumns; ++k) {
    const int plane = mine.first + k;
    const bool middle = odd && plane == bucket.bits / 2;  // the lower half stores it
    if (plane >= mine.last || (middle && bucket.lane.half)) continue;
    *reinterpret_cast<uint32_t*>(planes + plane * bucket.columns + bucket.column(tile)) =
        middle ? codes.number[k] | shared : codes.number[k];
  }
}

// Records start at multiples of 4 bytes, not of 8.
__device__ Meta load_meta(const uint8_t* record) {
  const float* const words = reinterpret_cast<const float*>(record);
  return {words[0], words[1]};
}

// What a lane reads of a record's tile: its bytes of each plane, as they lie.
struct Encoded {
  Meta meta;
  uint32_t word[kColumns] = {};

  __device__ Encoded(const Bucket& bucket, const uint8_t* record, int tile)
      : meta(load_meta(record)) {
    const Planes mine(bucket.bits, bucket.lane.half);
    const uint8_t* const planes = Record::planes(record) + bucket.column(tile);
    if (bucket.column(tile) >= bucket.columns) return;
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
      const int plane = mine.first + k;
      if (plane >= mine.last) break;
      word[k] = *reinterpret_cast<const uint32_t*>(planes + plane * bucket.columns);
    }
  }
  __device__ Codes codes(const Bucket& bucket) const {
    const Planes mine(bucket.bits, bucket.lane.half);
    Codes codes;
#pragma unroll
    for (int k = 0; k < kColumns; ++k) codes.number[k] = word[k];
    transpose_bytes(codes.number);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) codes.number[c] >>= mine.shift;
    return codes;
  }
};

__device__ void store_meta(const Lane& lane, uint8_t* record, Meta meta) {
  if (lane.index < 2)
    reinterpret_cast<float*>(record)[lane.index] = lane.index ? meta.unit : meta.lo;
}

// Floats in the order of signed integers, for the warp's integer reductions; its own inverse.
__device__ int32_t ordered(float x) {
  const int32_t bits = bit_cast<int32_t>(x);
  return bits ^ (bits >> 31 & 0x7fffffff);
}
__device__ float unordered(int32_t x) { return bit_cast<float>(x ^ (x >> 31 & 0x7fffffff)); }

// The extremes of the values that a lane has seen.
struct Range {
  float min = bit_cast<float>(0x7f800000u), max = bit_cast<float>(0xff800000u);
  uint32_t magnitude = 0;  // the largest, as bits: exponents of 255 stand out

  __device__ void add(const Tile& t) {
#pragma unroll
    for (int r = 0; r < kHalfRows; ++r) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        min = fminf(min, t.v[r][c]);
        max = fmaxf(max, t.v[r][c]);
        const uint32_t bits = bit_cast<uint32_t>(t.v[r][c]) & 0x7fffffffu;
        magnitude = bits > magnitude ? bits : magnitude;
      }
    }
  }
  // The bucket's meta, from all lanes.
  __device__ Meta meta(int bits) const {
    const float lo = unordered(__reduce_min_sync(kEveryLane, ordered(min)));
    const float hi = unordered(__reduce_max_sync(kEveryLane, ordered(max)));
    const bool finite = __all_sync(kEveryLane, magnitude < 0x7f800000u);
    return make_meta(lo, hi, finite, bits);
  }
};

// Encodes a tile of a bucket. With kResidual `t` becomes what is lost, times `factor`.
template <bool kStochastic, bool kResidual>
__device__ void encode_tile(const Bucket& bucket, Meta meta, NoiseSeed seed, int tile,
                            uint8_t* record, float factor, Tile* t) {
  const float inverse = inverse_unit(meta);
  Codes codes;
#pragma unroll
  for (int r = 0; r < kHalfRows; ++r) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      float& x = t->v[r][c];
      const int i = bucket.index(tile, r) + c;
      uint32_t code;
      if (kStochastic) {
        const float rounding = noise<float>(static_cast<uint32_t>(i), seed);
        code = stochastic_code(x, meta.lo, inverse, rounding, bucket.bits);
      } else {
        code = nearest_code(x, meta.lo, inverse);
      }
      if (poisoned(meta) || (bucket.ragged() && i >= bucket.values)) code = 0;
      codes.set(r, c, bucket.bits, code);
      if (kResidual) x = canonical_nan((x - decode<float>(code, meta)) * factor);
    }
  }
  store_codes(bucket, Record::planes(record), tile, codes);
}

// Finds a bucket's range and encodes it. `values(tile)` gives a tile, pads within the range; it is
// called once for each tile where kTiles says how many there are at most (0: any number, twice).
// What is lost goes to `residual`, times `factor`, with kResidual.
template <int kTiles, bool kStochastic, bool kResidual, typename Values>
__device__ void encode_bucket(const Bucket& bucket, NoiseSeed seed, uint8_t* record, Values values,
                              char* residual, float factor) {
  Range range;
  Tile held[kTiles ? kTiles : 1];
  if (kTiles) {
#pragma unroll
    for (int k = 0; k < kTiles; ++k) {
      if (k < bucket.tiles()) range.add(held[k] = values(k));
    }
  } else {
    for (int k = 0; k < bucket.tiles(); ++k) range.add(values(k));
  }
  const Meta meta = range.meta(bucket.bits);
  store_meta(bucket.lane, record, meta);
  if (kTiles) {
#pragma unroll
    for (int k = 0; k < kTiles; ++k) {
      if (k >= bucket.tiles()) break;
      encode_tile<kStochastic, kResidual>(bucket, meta, seed, k, record, factor, &held[k]);
      if (kResidual) store_tile(bucket, residual, k, held[k]);
    }
  } else {
    for (int k = 0; k < bucket.tiles(); ++k) {
      Tile t = values(k);
      encode_tile<kStochastic, kResidual>(bucket, meta, seed, k, record, factor, &t);
      if (kResidual) store_tile(bucket, residual, k, t);
    }
  }
}

// (own values + decoded records of the peers, in order, without `skip`) / divisor.
__device__ Tile sum_tile(const Bucket& bucket, const char* own, const uint8_t* records,
                         int64_t peer_stride, int peers, int skip, Divide divide, int tile) {
  Tile t = load_tile(bucket, own, tile, 0.0f);
  // The next peer's record is asked for before this one's is decoded: memory is far, and a warp
  // that waited for every peer in turn would leave it idle.
  const auto after = [&](int peer) { return peer + 1 == skip ? peer + 2 : peer + 1; };
  int peer = after(-1);
  if (peer < peers) {
    Encoded now(bucket, records + peer * peer_stride, tile);
#pragma unroll 1
    while (peer < peers) {
      peer = after(peer);
      Encoded ahead = now;
      if (peer < peers) ahead = Encoded(bucket, records + peer * peer_stride, tile);
      const Codes codes = now.codes(bucket);
#pragma unroll
      for (int r = 0; r < kHalfRows; ++r) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          t.v[r][c] += decode<float>(codes.get(r, c, bucket.bits), now.meta);
        }
      }
      now = ahead;
    }
  }
#pragma unroll
  for (int r = 0; r < kHalfRows; ++r) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) t.v[r][c] = canonical_nan(divide(t.v[r][c]));
  }
  return t;
}

// The values that a range is found from: those that do not exist repeat the bucket's first.
__device__ Tile without_pads(const Bucket& bucket, int tile, Tile t, float first) {
  const bool here = bucket.column(tile) < bucket.columns;
  if (here && !bucket.ragged()) return t;
#pragma unroll
  for (int r = 0; r < kHalfRows; ++r) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if (!here || bucket.index(tile, r) + c >= bucket.values) t.v[r][c] = first;
    }
  }
  return t;
}

}  // namespace
}  // namespace cgx

#endif  // CGX_BUCKETS_CUDA_H_
