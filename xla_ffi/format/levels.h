// The arithmetic of codes that are rounded at random, for one value or a vector of values, for host
// and device. Every step rounds to fp32 on its own, as in quantize.h.
//
// The functions of single values come first here. Vector types need their own overloads of these
// functions: include the header with the overloads before this file.
#ifndef CGX_FORMAT_LEVELS_H_
#define CGX_FORMAT_LEVELS_H_

#include <stdint.h>

#include "format/quantize.h"

namespace cgx {

inline namespace CGX_ISA {

// A value's bits without the sign. They have the same order as the magnitudes, NaN above infinity.
CGX_HD int32_t magnitude_bits(float x) { return bit_cast<int32_t>(x) & 0x7fffffff; }

// x, or 0 if x is subnormal. Some processors treat subnormals as 0, so all of them must.
CGX_HD float without_subnormals(float x) { return magnitude_bits(x) < 0x00800000 ? 0.0f : x; }

CGX_HD bool any_below(int32_t x, int32_t least) { return x < least; }

CGX_HD int32_t lesser_of(int32_t a, int32_t b) { return a < b ? a : b; }

// x, negated where `sign` is negative.
CGX_HD int32_t negated(int32_t x, int32_t sign) { return sign < 0 ? -x : x; }

// x plus noise in [0, 1). The product is exact, so the result is rounded only once.
CGX_HD float add_uniform(float x, uint32_t noise) {
  return x + Lanes<float>::to_float(noise >> 8) * 0x1p-24f;
}

// A bucket's scale, and the two factors that bring its values to at most `top`. Values are first
// multiplied by `down`, a power of two, because the inverse of a large scale is not a normal number
// and the inverse of a small scale may overflow. Then they are multiplied by `factor`.
struct Scale {
  static constexpr float kSmall = 0x1p-90f, kLarge = 0x1p64f;
  float value = 0, down = 1, factor = 0;

  // Whether `down` is 1 and subnormal values cannot change a code.
  CGX_HD bool usual() const { return value >= kSmall && value <= kLarge; }

  CGX_HD static Scale of(float value, float top) {
    const float down = value > kLarge ? 1 / kLarge : value < kSmall ? kLarge : 1.0f;
    return {value, down, top / (value * down)};
  }
  // The scale of a bucket whose largest magnitude has these bits. Bits at or above those of
  // infinity mean that a value is not finite.
  CGX_HD static Scale of_largest(int32_t bits, float top) {
    if (bits >= 0x7f800000) return {bit_cast<float>(kQuietNan), 1, 0};
    if (bits < 0x00800000) return {0, 1, 0};
    return of(bit_cast<float>(bits), top);
  }
  // The L2 norm, which is also right where the squares of the values would overflow or vanish:
  // `largest` first brings the values to at most 1, and `squares` is the sum of the squares of the
  // results. The norm is limited to the largest float.
  CGX_HD static Scale of_squares(const Scale& largest, float squares, float top) {
    const float norm = largest.value * square_root(squares);
    return of(norm < kLargest ? norm : kLargest, top);
  }
};

// Values in multiples of the scale / top.
template <typename F>
CGX_HD F scaled(const Scale& scale, F x) {
  return without_subnormals(x) * scale.down * scale.factor;
}

template <bool kUsual, typename F>
CGX_HD F share_of(const Scale& scale, F x) {
  const F magnitude = bit_cast<F>(magnitude_bits(x));
  return kUsual ? magnitude * scale.factor : scaled(scale, magnitude);
}

// A sign and a power of two.
struct Natural {
  static constexpr bool kScaled = false;
  template <bool kUsual, typename F, typename U = typename Lanes<F>::U>
  CGX_HD static U code(const Scale&, int32_t, F x, U noise) {
    constexpr int kBefore = 32;        // the biased exponent of what would be code 0
    constexpr int kLowest = 33 << 23;  // the bits of code 1's power
    constexpr int kNotFinite = 127;
    const auto magnitude = magnitude_bits(x);
    using I = decltype(magnitude_bits(x));
    // The mantissa is the probability of the next power: adding noise carries into the exponent.
    const I power = (I)(((U)magnitude + (noise >> 9)) >> 23) - kBefore;
    I code = lesser_of(power, I{} + kNotFinite);
    if (__builtin_expect(any_below(magnitude, kLowest), 0)) {
      const I small = (add_uniform(bit_cast<F>(magnitude) * 0x1p94f, noise) >= 1.0f) & 1;
      code = magnitude < kLowest ? small : code;
    }
    return (U)code | (bit_cast<U>(x) >> 24 & 0x80);
  }
};

// Codes 0, 1 and 2 stand for minus the scale, 0 and the scale.
struct Ternary {
  static constexpr bool kScaled = true;
  CGX_HD static float top(int32_t) { return 1; }
  template <bool kUsual, typename F, typename U = typename Lanes<F>::U>
  CGX_HD static U code(const Scale& scale, int32_t, F x, U noise) {
    using I = decltype(magnitude_bits(x));
    if (!kUsual && scale.factor == 0) return U{} + 1u;
    const I level = (I)Lanes<F>::truncate(add_uniform(share_of<kUsual>(scale, x), noise));
    return (U)(1 + negated(level, bit_cast<I>(x)));
  }
};

// Multiples of the scale / levels.
struct Steps {
  static constexpr bool kScaled = true;
  CGX_HD static float top(int32_t levels) { return (float)levels; }
  template <bool kUsual, typename F, typename U = typename Lanes<F>::U>
  CGX_HD static U code(const Scale& scale, int32_t levels, F x, U noise) {
    using I = decltype(magnitude_bits(x));
    const I top = I{} + levels;
    if (!kUsual && scale.factor == 0) return (U)top;
    const F steps = add_uniform(share_of<kUsual>(scale, x), noise);
    return (U)(top + negated(lesser_of((I)Lanes<F>::truncate(steps), top), bit_cast<I>(x)));
  }
};

}  // namespace CGX_ISA
}  // namespace cgx

#endif  // CGX_FORMAT_LEVELS_H_
