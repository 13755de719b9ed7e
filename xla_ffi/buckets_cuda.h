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

#include "tiles_cuda.h"

namespace cgx {
namespace {

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
  if (!bucket.has(tile)) return;
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
    if (!bucket.has(tile)) return;
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

  __device__ void add(const Bucket& bucket, int tile, const Tile& t) {
    if (!bucket.has(tile)) return;
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
  // Makes the extremes those of all lanes; whether all values are finite.
  __device__ bool meet() {
    min = unordered(__reduce_min_sync(kEveryLane, ordered(min)));
    max = unordered(__reduce_max_sync(kEveryLane, ordered(max)));
    return __all_sync(kEveryLane, magnitude < 0x7f800000u);
  }
};

// The sum of the squares of a bucket's values times `scale`, in the order of the wire format, for a
// bucket of one tile. An addition gives both of its lanes the same bits, so every lane ends with
// the same sum; columns that do not exist add nothing.
__device__ float sum_of_squares(const Bucket& bucket, const Tile& t, float scale) {
  float sum[kColumns] = {};
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    float square[kHalfRows];
#pragma unroll
    for (int r = 0; r < kHalfRows; ++r) {
      const float x = t.v[r][c] * scale;
      square[r] = x * x;
    }
    if (bucket.has(0)) sum[c] = (square[0] + square[1]) + (square[2] + square[3]);
    sum[c] += __shfl_xor_sync(kEveryLane, sum[c], kWarp / 2);
#pragma unroll
    for (int lanes = kWarp / 4; lanes > 0; lanes /= 2) {
      sum[c] += __shfl_xor_sync(kEveryLane, sum[c], lanes);
    }
  }
  return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

// Noise of a bucket's values.
struct Noise {
  NoiseSeed seed;
  float offset;
};

// Encodes a tile of a bucket. With kResidual `t` becomes what is lost.
template <bool kStochastic, bool kResidual>
__device__ void encode_tile(const Bucket& bucket, Meta meta, Noise noise, int tile, uint8_t* record,
                            Tile* t) {
  const float inverse = inverse_unit(meta);
  Codes codes;
  const auto encode = [&](auto code_of) {
#pragma unroll
    for (int r = 0; r < kHalfRows; ++r) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        float& x = t->v[r][c];
        const int i = bucket.index(tile, r) + c;
        uint32_t code = code_of(x, i);
        if (poisoned(meta) || (bucket.padded() && i >= bucket.values)) code = 0;
        codes.set(r, c, bucket.bits, code);
        if (kResidual) x -= decode<float>(code, meta);
      }
    }
  };
  if (kStochastic) {
    encode([&](float x, int i) {
      const float up = cgx::noise<float>(static_cast<uint32_t>(i), noise.seed, noise.offset);
      return stochastic_code(x, meta.lo, inverse, up, bucket.bits);
    });
  } else if (bucket.rotated) {
    encode([&](float x, int) { return clipped_code(x, meta.lo, inverse, bucket.bits); });
  } else {
    encode([&](float x, int) { return nearest_code(x, meta.lo, inverse); });
  }
  store_codes(bucket, Record::planes(record), tile, codes);
}

// Stores what coding has lost of a tile, times `factor`.
__device__ void store_lost(const Bucket& bucket, int tile, float factor, Tile t) {
  rotate_back(bucket, tile, &t);
#pragma unroll
  for (int r = 0; r < kHalfRows; ++r) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) t.v[r][c] = canonical_nan(t.v[r][c] * factor);
  }
  store_tile(bucket, tile, t);
}

// Finds a bucket's range and encodes it. `values(tile)` gives a tile as it is coded, pads within
// the range; it is called once for each tile where kTiles says how many there are at most (0: any
// number, more than once). With kResidual it stores what is lost, times `factor`.
template <int kTiles, bool kStochastic, bool kResidual, typename Values>
__device__ void encode_bucket(const Bucket& bucket, Noise noise, uint8_t* record, Values values,
                              float factor) {
  Tile held[kTiles ? kTiles : 1];
  const auto pass = [&](bool first, auto f) {
    if (kTiles) {
#pragma unroll
      for (int k = 0; k < kTiles; ++k) {
        if (k >= bucket.tiles()) break;
        if (first) held[k] = values(k);
        f(k, &held[k]);
      }
    } else {
      for (int k = 0; k < bucket.tiles(); ++k) {
        Tile t = values(k);
        f(k, &t);
      }
    }
  };
  Range range;
  pass(true, [&](int k, Tile* t) { range.add(bucket, k, *t); });
  const bool finite = range.meet();
  Meta meta = make_meta(range.min, range.max, finite, bucket.bits);
  if (!kStochastic && bucket.rotated && Rotation::whole(bucket.columns)) {
    const float down = Scaling(range.min, range.max).down;
    const float squares = sum_of_squares(bucket, kTiles ? held[0] : values(0), down);
    meta = make_clipped_meta(range.min, range.max, finite, squares, kRows * bucket.columns,
                             bucket.bits);
  }
  store_meta(bucket.lane, record, meta);
  pass(false, [&](int k, Tile* t) {
    encode_tile<kStochastic, kResidual>(bucket, meta, noise, k, record, t);
    if (kResidual) store_lost(bucket, k, factor, *t);
  });
}

// Adds the decoded records of the peers, in order, without `skip`.
__device__ void add_peers(const Bucket& bucket, const uint8_t* records, int64_t peer_stride,
                          int peers, int skip, int tile, Tile* t) {
  // The next peer's record is asked for before this one's is decoded: memory is far, and a warp
  // that waited for every peer in turn would leave it idle.
  const auto after = [&](int peer) { return peer + 1 == skip ? peer + 2 : peer + 1; };
  int peer = after(-1);
  if (peer >= peers) return;
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
        t->v[r][c] += decode<float>(codes.get(r, c, bucket.bits), now.meta);
      }
    }
    now = ahead;
  }
}

__device__ void add_tile(const Tile& other, Tile* t) {
#pragma unroll
  for (int r = 0; r < kHalfRows; ++r) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) t->v[r][c] += other.v[r][c];
  }
}

__device__ void divide_tile(Divide divide, Tile* t) {
#pragma unroll
  for (int r = 0; r < kHalfRows; ++r) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) t->v[r][c] = canonical_nan(divide(t->v[r][c]));
  }
}

// The values that a range is found from: those that do not exist repeat the bucket's first.
__device__ Tile without_pads(const Bucket& bucket, int tile, Tile t, float first) {
  if (!bucket.padded()) return t;
#pragma unroll
  for (int r = 0; r < kHalfRows; ++r) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if (bucket.index(tile, r) + c >= bucket.values) t.v[r][c] = first;
    }
  }
  return t;
}

}  // namespace
}  // namespace cgx

#endif  // CGX_BUCKETS_CUDA_H_
