// The arithmetic of wire format 2, for one value or a vector of values, for host and device.
// Every step rounds to fp32 on its own: compile with -ffp-contract=off (-fmad=false).
// The functions live in a namespace named after the instruction set they are compiled for.
#ifndef CGX_FORMAT_QUANTIZE_H_
#define CGX_FORMAT_QUANTIZE_H_

#include <stdint.h>
#include <string.h>

#include "format/wire_format.h"

#ifndef CGX_ISA
#define CGX_ISA generic
#endif

namespace cgx {
inline namespace CGX_ISA {

// The integer types of F's lanes, and F's conversions. Kernels specialise it for their vectors.
template <typename F>
struct Lanes;

template <>
struct Lanes<float> {
  using U = uint32_t;
  CGX_HD static U truncate(float x) { return (U)(int32_t)x; }
  CGX_HD static float to_float(U x) { return (float)(int32_t)x; }
  // `a` where b is NaN.
  CGX_HD static float lesser(float a, float b) { return b < a ? b : a; }
  CGX_HD static float greater(float a, float b) { return b > a ? b : a; }
};

template <typename To, typename From>
CGX_HD To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}

// An IEEE square root, rounded once.
CGX_HD float square_root(float x) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(x);
#else
  return __builtin_sqrtf(x);
#endif
}

constexpr float kSmallestUnit = 1.17549435e-38f;  // smaller units lose precision: send only lo
constexpr float kLargest = 3.40282347e+38f;
constexpr uint32_t kQuietNan = 0x7fc00000u;

CGX_HD bool poisoned(Meta meta) { return meta.lo != meta.lo; }

// Checks a received meta: numbers that no encoder writes poison the bucket. The decoded NaN then
// depends neither on the payload of the received NaN nor on the processor.
CGX_HD Meta checked(Meta meta) {
  const float lo = meta.lo < 0.0f ? -meta.lo : meta.lo;
  const float unit = meta.unit < 0.0f ? -meta.unit : meta.unit;
  return lo <= kLargest && unit <= kLargest ? meta : Meta{bit_cast<float>(kQuietNan), 0.0f};
}

// The meta of a bucket from its extremes; a quiet NaN poisons a bucket that cannot be represented.
CGX_HD Meta make_meta(float min, float max, bool finite, int bits) {
  const float lo = min + 0.0f;  // -0 becomes +0
  const float range = max - lo;
  if (!finite || !(range <= kLargest)) return {bit_cast<float>(kQuietNan), 0.0f};
  const float top = (float)((1 << bits) - 1);
  float unit = range / top;
  // Near the largest float the topmost level may round past it: two steps of the unit are enough.
  for (int i = 0; i < 2; ++i) {
    if (!(lo + unit * top <= kLargest)) unit = bit_cast<float>(bit_cast<uint32_t>(unit) - 1);
  }
  return {lo, unit < kSmallestUnit ? 0.0f : unit};
}

// The first 8 bytes of a record: the meta, and which segments of the bucket are zero. Most buckets
// have no mask. A mask takes the lower half of the unit, whose sign then is 1.
struct Header {
  float lo;
  uint32_t word;

  Header() = default;
  // A unit with a mask is rounded up to a bf16, unless the topmost level would overflow.
  CGX_HD Header(Meta meta, uint32_t mask, int bits)
      : lo(meta.lo), word(bit_cast<uint32_t>(meta.unit)) {
    const uint32_t rounded = (word + 0xffffu) & ~0xffffu;
    const float most = lo + bit_cast<float>(rounded) * (float)((1 << bits) - 1);
    if (mask != 0 && most <= kLargest) word = kMasked | rounded | mask;
  }
  CGX_HD bool masked() const { return word & kMasked; }
  CGX_HD uint32_t mask() const { return masked() ? word & 0xffffu : 0u; }
  CGX_HD Meta meta() const { return {lo, bit_cast<float>(masked() ? word & 0x7fff0000u : word)}; }

 private:
  static constexpr uint32_t kMasked = 0x80000000u;
};
static_assert(sizeof(Header) == kHeaderBytes, "the wire format stores a header as 8 bytes");

// The segments of one bucket. Bit number(i) of its record's mask stands for the bucket's value i.
struct MaskSegments {
  int64_t length, phase;  // phase: the place of the bucket's first value in its segment

  CGX_HD MaskSegments(const Slot& slot, int64_t bucket)
      : length(slot.segment), phase(bucket * slot.bucket_size % slot.segment) {}
  CGX_HD int number(int64_t i) const { return (int)((phase + i) / length); }
  CGX_HD int64_t begin(int number) const {
    const int64_t first = number * length - phase;
    return first > 0 ? first : 0;
  }
  CGX_HD int64_t end(int number, int64_t values) const {
    const int64_t last = (number + 1) * length - phase;
    return last < values ? last : values;
  }
};

// Limits a decoded value to [-largest, largest], because rounding may take it past these bounds.
template <typename F>
CGX_HD F within(F x, float largest) {
  const F most = F{} + largest;
  const F below = x > most ? most : x;
  return below < -most ? -most : below;
}

// The bound w of the range [-w, w] of rotated values, in multiples of their root mean square. With
// this w, evenly spaced levels of so many bits have the least mean square error for a normal
// distribution.
CGX_HD float normal_range(int bits) {
  constexpr float kRange[kMaxBits + 1] = {0.0f,    0.7979f, 1.4935f, 2.0511f, 2.5140f,
                                          2.9162f, 3.2780f, 3.6111f, 3.9222f};
  return kRange[bits];
}

// `down` is a power of two that brings values with these extremes below 4, so that their squares
// add up without overflow and without loss. `up` is its inverse.
struct Scaling {
  float down, up;

  CGX_HD Scaling(float min, float max) {
    const float largest = max > -min ? max : -min;
    const uint32_t bits = bit_cast<uint32_t>(largest) >> 23;
    const uint32_t exponent = bits < 1 ? 1 : bits > 253 ? 253 : bits;
    down = bit_cast<float>((254 - exponent) << 23);
    up = bit_cast<float>(exponent << 23);
  }
};

// The meta of a bucket that is rotated as one block and rounded to nearest. Its extremes are
// clipped at normal_range if that leaves a range. `squares` is the sum of the squares of the
// bucket's `values` values, each multiplied by Scaling::down. A bucket of several blocks is not
// clipped, because its blocks may differ too much in magnitude.
CGX_HD Meta make_clipped_meta(float min, float max, bool finite, float squares, int64_t values,
                              int bits) {
  const float limit =
      normal_range(bits) * square_root(squares / (float)values) * Scaling(min, max).up;
  const float lo = min < -limit ? -limit : min, hi = max > limit ? limit : max;
  const bool clipped = finite && lo < hi;
  return make_meta(clipped ? lo : min, clipped ? hi : max, finite, bits);
}

CGX_HD float inverse_unit(Meta meta) { return meta.unit > 0.0f ? 1.0f / meta.unit : 0.0f; }

// Nearest code. Even the largest value gives less than 2^bits, because its error is only 3
// roundings of relative size 2^-24.
template <typename F>
CGX_HD typename Lanes<F>::U nearest_code(F x, float lo, float inverse) {
  return Lanes<F>::truncate((x - lo) * inverse + 0.5f);
}

// Nearest code of a value that may lie outside the range.
template <typename F>
CGX_HD typename Lanes<F>::U clipped_code(F x, float lo, float inverse, int bits) {
  const F top = F{} + (float)((1 << bits) - 1), level = (x - lo) * inverse + 0.5f;
  return Lanes<F>::truncate(Lanes<F>::lesser(top, Lanes<F>::greater(F{}, level)));
}

// Code rounded up with the probability of the fraction; `noise` lies in [0, 1).
template <typename F>
CGX_HD typename Lanes<F>::U stochastic_code(F x, float lo, float inverse, F noise, int bits) {
  using U = typename Lanes<F>::U;
  const U top = U{} + (uint32_t)((1 << bits) - 1);
  const U code = Lanes<F>::truncate((x - lo) * inverse + noise);
  return code < top ? code : top;
}

template <typename F>
CGX_HD F decode(typename Lanes<F>::U code, Meta meta) {
  return meta.lo + meta.unit * Lanes<F>::to_float(code);
}

// x / divisor. A power of two is multiplied by its inverse: the same bits, many times faster.
struct Divide {
  float by;
  bool multiply;

  CGX_HD explicit Divide(float divisor) : by(divisor), multiply(false) {
    const uint32_t bits = bit_cast<uint32_t>(divisor), exponent = bits >> 23 & 255u;
    if ((bits & 0x7fffffu) == 0 && exponent > 0 && exponent < 254) {
      multiply = true;
      by = 1.0f / divisor;
    }
  }
  template <typename F>
  CGX_HD F operator()(F x) const {
    return multiply ? x * by : x / by;
  }
};

// A NaN whose sign and payload do not depend on the processor.
template <typename F>
CGX_HD F canonical_nan(F x) {
  using U = typename Lanes<F>::U;
  return x == x ? x : bit_cast<F>(U{} + kQuietNan);
}

// 32-bit finalizer with low bias (C. Wellons, "Prospecting for hash functions").
CGX_HD uint32_t mix(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  x ^= x >> 16;
  return x;
}

// Counter-based noise of one bucket: the same for every processor, world size and run.
struct NoiseSeed {
  uint32_t s0;
  uint32_t s1;
};

// The part of the seed that all buckets of a leaf share.
struct LeafSeed {
  uint32_t a, d;

  CGX_HD LeafSeed(uint32_t key0, uint32_t key1, uint32_t number)
      : a(mix(key0 ^ mix(number + 0x9e3779b9u))), d(mix(key1 + a)) {}
  CGX_HD NoiseSeed bucket(uint64_t bucket) const {
    const uint32_t k_lo = (uint32_t)bucket, k_hi = (uint32_t)(bucket >> 32);
    const uint32_t s0 = mix(mix(a ^ k_lo) + k_hi);
    return {s0, mix((d + s0 * 0x85ebca6bu) ^ k_lo)};
  }
};

CGX_HD NoiseSeed noise_seed(const uint32_t key[2], uint32_t number, uint64_t bucket) {
  return LeafSeed(key[0], key[1], number).bucket(bucket);
}

// 32 random bits per index.
template <typename U>
CGX_HD U random_bits(U index, NoiseSeed seed) {
  U x = index + seed.s0;
  x ^= x >> 16;
  x *= 0x7feb352du;
  x += seed.s1;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  x ^= x >> 16;
  return x;
}

// Noise in [0, 1) for the values with these indices in the bucket. `offset`, in [0, 1), is added
// modulo 1: ranks with the same seed and evenly spaced offsets spread their noise evenly.
template <typename F>
CGX_HD F noise(typename Lanes<F>::U index, NoiseSeed seed, float offset) {
  constexpr float kStep = 5.9604644775390625e-08f;  // 2^-24
  const F u = Lanes<F>::to_float(random_bits(index, seed) >> 8) * kStep + offset;
  if (offset == 0.0f) return u;
  return u >= 1.0f ? u - 1.0f : u;
}

// The offset of a rank's noise. Rank -1 means no rank.
CGX_HD float noise_offset(Rounding rounding, int64_t rank, int64_t world) {
  return rounding == Rounding::kCorrelated && rank > 0 ? (float)rank / (float)world : 0.0f;
}

// The rotation of a bucket: random signs, then a Hadamard transform of blocks of 8 rows by
// `columns` columns. `columns` is the largest power of two up to 64 that divides the bucket's
// columns. The scales are powers of two. With an odd number of stages no such scale makes the
// transform orthogonal, so each direction has its own scale.
struct Rotation {
  static constexpr int kColumns = 64;
  int columns;
  float forward, inverse;
  NoiseSeed seed;

  CGX_HD static LeafSeed leaf_seed(uint32_t number) {
    return LeafSeed(0x726f7461u, 0x74696f6eu, number);
  }
  CGX_HD Rotation(int64_t bucket_columns, uint32_t number, uint64_t bucket)
      : Rotation(bucket_columns, leaf_seed(number), bucket) {}
  CGX_HD Rotation(int64_t bucket_columns, LeafSeed leaf, uint64_t bucket) {
    seed = leaf.bucket(bucket);
    columns = block(bucket_columns);
    int stages = 3;
    for (int c = columns; c > 1; c /= 2) ++stages;
    forward = bit_cast<float>((uint32_t)(127 - stages / 2) << 23);
    inverse = bit_cast<float>((uint32_t)(127 - (stages - stages / 2)) << 23);
  }
  CGX_HD static int block(int64_t bucket_columns) {
    const int64_t power = bucket_columns & -bucket_columns;
    return power < kColumns ? (int)power : kColumns;
  }
  // Whether a bucket with this many columns is one block.
  CGX_HD static bool whole(int64_t bucket_columns) {
    return block(bucket_columns) == bucket_columns;
  }
  // One number per column. The sign of row r is bit 31 of the number after a left shift by r.
  template <typename U>
  CGX_HD U signs(U column) const {
    return random_bits(column, seed);
  }
};

// x with its sign changed where bit 31 of `sign` is set.
template <typename F>
CGX_HD F flip(F x, typename Lanes<F>::U sign) {
  return bit_cast<F>(bit_cast<typename Lanes<F>::U>(x) ^ (sign & 0x80000000u));
}

// bf16 and f16 as bit patterns in the low half of 32-bit lanes. Widening is exact; narrowing rounds
// to nearest even and treats NaN as ml_dtypes (bf16) and NumPy (f16) do.
template <typename F>
CGX_HD F widen_bf16(typename Lanes<F>::U half) {
  return bit_cast<F>(half << 16);
}

template <typename F>
CGX_HD typename Lanes<F>::U narrow_bf16(F x) {
  using U = typename Lanes<F>::U;
  const U bits = bit_cast<U>(x);
  const U rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const U nan = ((bits >> 16) & 0x8000u) | 0x7fc0u;
  return (bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded;
}

template <typename F>
CGX_HD F widen_f16(typename Lanes<F>::U half) {
  using U = typename Lanes<F>::U;
  const U magnitude = (half & 0x7fffu) << 13;
  const U exponent = magnitude & 0x0f800000u;
  const U normal = magnitude + (112u << 23);
  // A subnormal half is an integer times 2^-24: make it the mantissa of 2^-14, then subtract 2^-14.
  const U subnormal = bit_cast<U>(bit_cast<F>(magnitude + (113u << 23)) - 6.103515625e-05f);
  const U special = magnitude | 0x7f800000u;
  const U wide = exponent == 0u ? subnormal : exponent == 0x0f800000u ? special : normal;
  return bit_cast<F>(wide | ((half & 0x8000u) << 16));
}

template <typename F>
CGX_HD typename Lanes<F>::U narrow_f16(F x) {
  using U = typename Lanes<F>::U;
  const U bits = bit_cast<U>(x);
  const U magnitude = bits & 0x7fffffffu;
  const U normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Below 2^-14 the sum with 0.5 rounds at 2^-24, the spacing of subnormal halves.
  const U subnormal = bit_cast<U>(bit_cast<F>(magnitude) + 0.5f) - 0x3f000000u;
  const U payload = (magnitude >> 13) & 0x3ffu;
  const U nan = 0x7c00u | (payload == 0u ? U{} + 1u : payload);
  const U finite = magnitude < 0x38800000u ? subnormal : normal;
  const U large = magnitude > 0x7f800000u ? nan : U{} + 0x7c00u;
  return (magnitude >= 0x477ff000u ? large : finite) | ((bits >> 16) & 0x8000u);
}

}  // namespace CGX_ISA
}  // namespace cgx

#endif  // CGX_FORMAT_QUANTIZE_H_
