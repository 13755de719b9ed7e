// How a warp encodes and decodes one bucket; for device code only.
//
// One warp works on one bucket at a time. It sees the bucket as the wire format does, as 8 rows of
// columns, in tiles of 64 columns. The lower half of the warp holds rows 0 to 3, the upper half
// rows 4 to 7; every lane holds 4 rows by 4 columns. So each lane reads and writes values 16 bytes
// at a time (8 for 16-bit dtypes). A lane's codes of a column make up the low or the high half of
// the column's number, and its bytes of a plane make up one 32-bit word. The two halves share a
// byte only at odd widths.
//
// Ranges and codes come from the functions that the CPU kernels use, so the bytes are the same;
// compile with -fmad=false. No shared memory: lanes exchange data through registers.
#ifndef CGX_CUDA_BUCKETS_H_
#define CGX_CUDA_BUCKETS_H_

#include "cuda/factors.h"
#include "cuda/rotate.h"
#include "cuda/tiles.h"

namespace cgx {
namespace {

// The float 2^23 + n has n in its low bits. So a small whole number becomes a float, and a float a
// whole number, without a conversion.
constexpr uint32_t kWhole = 0x4b000000u;
constexpr float kWholeFloat = 8388608.0f;

// kWhole + the whole part of x, in [0, 2^23).
__device__ uint32_t whole_part(float x) {
#if defined(__CUDA_ARCH__)
  return bit_cast<uint32_t>(__fadd_rz(x, kWholeFloat));
#else
  return kWhole + static_cast<uint32_t>(x);
#endif
}

// Hides from the compiler that x is a power of two, so that it multiplies by x instead of shifting.
// A multiply-add does not load the busy integer units, and it includes the addition.
__device__ uint32_t opaque(uint32_t x) {
  asm("" : "+r"(x));
  return x;
}

// Byte `kByte` of each of four words.
template <int kByte>
__device__ uint32_t gather_bytes(const uint32_t (&w)[kColumns]) {
  constexpr unsigned kPair = kByte | (4 + kByte) << 4;
  return __byte_perm(__byte_perm(w[0], w[1], kPair), __byte_perm(w[2], w[3], kPair), 0x5410);
}

// Transposes the bytes of four words: byte k of word j becomes byte j of word k.
__device__ void transpose_bytes(uint32_t (&w)[kColumns]) {
  const uint32_t low01 = __byte_perm(w[0], w[1], 0x5140), low23 = __byte_perm(w[2], w[3], 0x5140);
  const uint32_t high01 = __byte_perm(w[0], w[1], 0x7362), high23 = __byte_perm(w[2], w[3], 0x7362);
  w[0] = __byte_perm(low01, low23, 0x5410);
  w[1] = __byte_perm(low01, low23, 0x7632);
  w[2] = __byte_perm(high01, high23, 0x5410);
  w[3] = __byte_perm(high01, high23, 0x7632);
}

// The planes that hold the bits of one half of the rows. At an odd width the two halves share the
// middle plane.
struct Planes {
  int first, count;
  int shift;  // where the half's first bit lies in its first plane

  __device__ Planes(int bits, int half)
      : first(half ? bits / 2 : 0), count((bits + 1) / 2), shift(half * (bits & 1) * 4) {}
};

// A lane's codes: for each of its columns, the number that its four rows make up. At widths up to
// 6, the bits above this number may be anything.
struct Codes {
  uint32_t number[kColumns];
};

__device__ void store_codes(const Bucket& bucket, uint8_t* planes, int tile, Codes codes) {
  const Planes mine(bucket.bits, bucket.lane.half);
  const int columns = bucket.columns;
  uint8_t* const at = planes + mine.first * columns + bucket.column(tile);
  const auto store = [&](int k, uint32_t word) {
    *reinterpret_cast<uint32_t*>(at + k * columns) = word;
  };
  const bool odd = bucket.bits & 1;
  if (!odd && mine.count <= 2) {  // most buffers: 2 or 4 bits
    const uint32_t first = gather_bytes<0>(codes.number);
    const uint32_t second = gather_bytes<1>(codes.number);
    if (!bucket.has(tile)) return;
    store(0, first);
    if (mine.count == 2) store(1, second);
    return;
  }
  if (odd) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) codes.number[c] <<= mine.shift;
  }
  transpose_bytes(codes.number);
  const uint32_t other = __shfl_xor_sync(kEveryLane, codes.number[0], kWarp / 2);
  if (!bucket.has(tile)) return;
#pragma unroll
  for (int k = 0; k < kColumns; ++k) {
    if (k >= mine.count) break;
    const bool middle = odd && k == (bucket.lane.half ? 0 : mine.count - 1);
    if (middle && bucket.lane.half) continue;  // the lower half stores it
    store(k, middle ? codes.number[k] | other : codes.number[k]);
  }
}

// Records start at multiples of 4 bytes, not of 8.
__device__ Header load_header(const uint8_t* record) {
  Header header;
  header.lo = reinterpret_cast<const float*>(record)[0];
  header.word = reinterpret_cast<const uint32_t*>(record)[1];
  return header;
}

// The width that most buffers have is known to the compiler, so that its masks and shifts are
// constants. kAny stands for all other widths.
constexpr int kUsualBits = 4, kAny = 0;

// What a lane reads of a record's tile: its bytes of each plane, in memory order.
struct Encoded {
  Header header;
  uint32_t word[kColumns] = {};

  // `planes` points to the lane's bytes of the first plane. Planes are `columns` bytes apart.
  __device__ void load(const uint8_t* record, const uint8_t* planes, int columns, int count) {
    header = load_header(record);
    const auto load = [&](int k) { word[k] = *reinterpret_cast<const uint32_t*>(planes); };
    if (count > 0) load(0);
    planes += columns;
    if (count > 1) load(1);
    if (count <= 2) return;
    planes += columns;
    load(2);
    planes += columns;
    if (count > 3) load(3);
  }

  // Calls f(value, row, column) for the lane's values. `meta` is the header's.
  template <int kBits, typename F>
  __device__ void values(const Bucket& bucket, Meta meta, F f) const {
    const int bits = kBits ? kBits : bucket.bits;
    const Codes codes = this->codes(bits, bucket.lane.half);
    const uint32_t low = (1u << bits) - 1u, high = low << bits;
    const float unit = meta.unit;
    if (unit == 0.0f || (unit >= kLeast && unit <= kMost)) {
      // unit * (2^23 + code) - unit * 2^23, rounded once, is unit * code, rounded once. The code of
      // an odd row is not shifted down, so it is 2^bits times too large and its unit 2^bits times
      // smaller.
      const float odd_unit = unit * bit_cast<float>(static_cast<uint32_t>(127 - bits) << 23);
      const float below = unit * -kWholeFloat, odd_below = odd_unit * -kWholeFloat;
      const auto value = [&](uint32_t number, uint32_t mask, float unit, float below) {
        return meta.lo + fmaf(unit, bit_cast<float>((number & mask) | kWhole), below);
      };
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const uint32_t rows01 = codes.number[c], rows23 = rows01 >> 2 * bits;
        f(value(rows01, low, unit, below), 0, c);
        f(value(rows01, high, odd_unit, odd_below), 1, c);
        f(value(rows23, low, unit, below), 2, c);
        f(value(rows23, high, odd_unit, odd_below), 3, c);
      }
      return;
    }
#pragma unroll
    for (int r = 0; r < kHalfRows; ++r) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        f(decode<float>(codes.number[c] >> r * bits & low, meta), r, c);
      }
    }
  }

 private:
  // For units in this range, both unit * 2^23 and unit / 2^8 are exact floats.
  static constexpr float kLeast = 7.8886091e-31f, kMost = 1.2676506e+30f;  // 2^-100, 2^100

  // Words past the last plane may hold anything: their bits lie above those of the codes.
  __device__ Codes codes(int bits, int half) const {
    Codes codes;
    if (bits <= 4) {
#pragma unroll
      for (unsigned c = 0; c < kColumns; ++c) {
        codes.number[c] = __byte_perm(word[0], word[1], c | (4 + c) << 4);
      }
    } else {
#pragma unroll
      for (int k = 0; k < kColumns; ++k) codes.number[k] = word[k];
      transpose_bytes(codes.number);
    }
    if (bits & 1) {
      const int shift = Planes(bits, half).shift;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) codes.number[c] >>= shift;
    }
    return codes;
  }
};

// The offset of a lane's bytes of a tile in a record, for Encoded::load.
__device__ int64_t planes_of(const Bucket& bucket, int tile) {
  const Planes mine(bucket.bits, bucket.lane.half);
  return int64_t{kHeaderBytes} + mine.first * bucket.columns + bucket.column(tile);
}

__device__ void store_header(const Lane& lane, uint8_t* record, Header header) {
  const uint32_t word = lane.index ? header.word : bit_cast<uint32_t>(header.lo);
  if (lane.index < 2) reinterpret_cast<uint32_t*>(record)[lane.index] = word;
}

// Finds the extremes of values from their bits. As signed numbers, the largest bits are those of
// the largest value, unless all values are negative. As unsigned numbers, they are those of the
// smallest value, unless no value is negative. A NaN lies past infinity in one of the two orders.
struct Range {
  int32_t as_signed = INT32_MIN;
  uint32_t as_unsigned = 0;
  float min, max;  // valid after meet()

  __device__ void add(const Bucket& bucket, int tile, const Tile& t) {
    if (!bucket.has(tile)) return;
    t.each([&](float x, int, int) {
      const uint32_t bits = bit_cast<uint32_t>(x);
      as_signed = ::max(as_signed, static_cast<int32_t>(bits));
      as_unsigned = ::max(as_unsigned, bits);
    });
  }
  // Combines the extremes of all lanes. Returns whether all values are finite. `smallest()` returns
  // the smallest bits of a lane's values; either all lanes call it or none.
  template <typename F>
  __device__ bool meet(F smallest) {
    as_signed = __reduce_max_sync(kEveryLane, as_signed);
    as_unsigned = __reduce_max_sync(kEveryLane, as_unsigned);
    max = bit_cast<float>(as_signed);
    min = bit_cast<float>(as_unsigned);
    // If all values have one sign, the other extreme is the value closest to zero.
    const bool no_positive = as_signed < 0, no_negative = as_unsigned < 0x80000000u;
    if (no_positive || no_negative) {
      const float closest = bit_cast<float>(__reduce_min_sync(kEveryLane, smallest()));
      if (no_positive) max = closest;
      if (no_negative) min = closest;
    }
    return as_signed < 0x7f800000 && as_unsigned < 0xff800000u;
  }
  static constexpr uint32_t kNone = 0xffffffffu;
  __device__ static uint32_t smallest(const Bucket& bucket, int tile, const Tile& t) {
    uint32_t bits = kNone;
    if (bucket.has(tile))
      t.each([&](float x, int, int) { bits = ::min(bits, bit_cast<uint32_t>(x)); });
    return bits;
  }
};

// The noise of a bucket's values.
struct Noise {
  NoiseSeed seed;
  float offset;
};

// Encodes a tile of a bucket. With kResidual, `t` becomes the encoding error.
template <bool kStochastic, bool kResidual>
__device__ void encode_tile(const Bucket& bucket, Meta meta, Noise noise, int tile, uint8_t* record,
                            Tile* t) {
  const int bits = bucket.bits;
  Codes codes = {};
  // `code_of(x, i)` is kWhole + the code of the bucket's value i.
  const auto encode_as = [&](auto code_of) {
    const uint32_t scale = opaque(1u << bits);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int r = kHalfRows - 1; r >= 0; --r) {
        float& x = t->v[r][c];
        const uint32_t code = code_of(x, bucket.index(tile, r) + c);
        codes.number[c] = codes.number[c] * scale + code;
        if (kResidual) x -= meta.lo + meta.unit * (bit_cast<float>(code) - kWholeFloat);
      }
    }
    // The numbers contain kWhole four times, each time with its row's scale. Up to a width of 6
    // these bits lie above the codes; at larger widths they must be subtracted.
    if (bits > 6) {
      const uint32_t above = kWhole * (1 + scale * (1 + scale * (1 + scale)));
#pragma unroll
      for (int c = 0; c < kColumns; ++c) codes.number[c] -= above;
    }
  };
  // `level(x, i)` is the code plus a fraction.
  const auto encode = [&](auto level) {
    if (bucket.padded()) {
      encode_as(
          [&](float x, int i) { return i < bucket.values ? whole_part(level(x, i)) : kWhole; });
    } else {
      encode_as([&](float x, int i) { return whole_part(level(x, i)); });
    }
  };
  if (poisoned(meta)) {
    if (kResidual) *t = filled(bit_cast<float>(kQuietNan));
  } else {
    const float inverse = inverse_unit(meta), top = static_cast<float>((1 << bits) - 1);
    if (kStochastic) {
      encode([&](float x, int i) {
        const float up = cgx::noise<float>(static_cast<uint32_t>(i), noise.seed, noise.offset);
        return fminf((x - meta.lo) * inverse + up, top);
      });
    } else if (bucket.rotated) {
      encode([&](float x, int) { return fminf(fmaxf((x - meta.lo) * inverse + 0.5f, 0.0f), top); });
    } else {
      encode([&](float x, int) { return (x - meta.lo) * inverse + 0.5f; });
    }
  }
  store_codes(bucket, Record::planes(record), tile, codes);
}

// Stores the encoding error of a tile, times `factor`, out of its units. It is 0 in masked
// segments.
template <typename Factors>
__device__ void store_lost(const Bucket& bucket, int tile, float factor, const Factors& factors,
                           uint32_t mask, Tile t) {
  rotate_back(bucket, tile, &t);
  t.each([&](float& x, int, int) { x = canonical_nan(x * factor); });
  if (factors.any()) {
    factors.multiply(bucket, tile, kOut, &t);
    t.each([&](float& x, int, int) { x = canonical_nan(x); });
  }
  if (mask != 0) clear_segments(bucket, tile, mask, &t);
  store_tile<false>(bucket, tile, t);
}

// The meta of a bucket whose range is known. `smallest()` is the argument of Range::meet; `t` is
// the bucket's tile if it has only one.
template <bool kStochastic, typename F>
__device__ Meta meta_of(const Bucket& bucket, Range range, const Tile& t, F smallest) {
  const bool finite = range.meet(smallest);
  if (kStochastic || !bucket.rotated || !Rotation::whole(bucket.columns)) {
    return make_meta(range.min, range.max, finite, bucket.bits);
  }
  const float squares = sum_of_squares(bucket, t, Scaling(range.min, range.max).down);
  return make_clipped_meta(range.min, range.max, finite, squares, kRows * bucket.columns,
                           bucket.bits);
}

// Finds a bucket's range and encodes the bucket. `values(tile)` returns a tile as it is encoded,
// with pads inside the range. kTiles is the largest number of tiles; `values` is then called once
// per tile. If the number is unknown, kTiles is 0 and `values` is called twice per tile. After all
// tiles, `zeros()` returns the mask. With kResidual, this stores the encoding error times `factor`.
template <int kTiles, bool kStochastic, bool kResidual, typename Factors, typename Values,
          typename Zeros>
__device__ void encode_bucket(const Bucket& bucket, Noise noise, uint8_t* record,
                              const Factors& factors, Values values, Zeros zeros, float factor) {
  Range range;
  Meta meta;
  uint32_t mask;
  const auto start = [&] {
    const Header header(meta, zeros(), bucket.bits);
    meta = header.meta();
    mask = header.mask();
    store_header(bucket.lane, record, header);
  };
  const auto code = [&](int k, Tile* t) {
    encode_tile<kStochastic, kResidual>(bucket, meta, noise, k, record, t);
    if (kResidual) store_lost(bucket, k, factor, factors, mask, *t);
  };
  if constexpr (kTiles == 0) {
    uint32_t smallest = Range::kNone;
#pragma unroll 1
    for (int step = 0; step < 2 * bucket.tiles(); ++step) {  // one loop: the code exists once
      const bool first = step < bucket.tiles();
      const int k = first ? step : step - bucket.tiles();
      Tile t = values(k);
      if (!first) {
        code(k, &t);
        continue;
      }
      range.add(bucket, k, t);
      smallest = ::min(smallest, Range::smallest(bucket, k, t));
      if (k + 1 < bucket.tiles()) continue;
      meta = meta_of<kStochastic>(bucket, range, t, [&] { return smallest; });
      start();
    }
  } else {
    Tile held[kTiles];
#pragma unroll
    for (int k = 0; k < kTiles; ++k) {
      if (k >= bucket.tiles()) break;
      held[k] = values(k);
      range.add(bucket, k, held[k]);
    }
    meta = meta_of<kStochastic>(bucket, range, held[0], [&] {
      uint32_t smallest = Range::kNone;
#pragma unroll
      for (int k = 0; k < kTiles; ++k) {
        if (k >= bucket.tiles()) break;
        smallest = ::min(smallest, Range::smallest(bucket, k, held[k]));
      }
      return smallest;
    });
    start();
#pragma unroll
    for (int k = 0; k < kTiles; ++k) {
      if (k >= bucket.tiles()) break;
      code(k, &held[k]);
    }
  }
}

}  // namespace
}  // namespace cgx

#endif  // CGX_CUDA_BUCKETS_H_
