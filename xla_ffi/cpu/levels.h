// Codes of a few bits, rounded at random: powers of two, three values, or multiples of a norm.
// Included only by cpu/codes.cc; everything lives in the instruction set's namespace.
#ifndef CGX_CPU_LEVELS_H_
#define CGX_CPU_LEVELS_H_

#include "cpu/masks.h"
#include "format/codes.h"
#include "format/levels.h"

namespace cgx {
inline namespace CGX_ISA {
namespace {

typedef uint64_t U64 __attribute__((vector_size(4 * kLanes)));

// The bits of the largest magnitude.
int32_t largest_bits(const float* x, int64_t n) {
  I32 most[2] = {};
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    prefetch_l2<2 * kLanes * 4>((const char*)(x + i) + kFarAhead);
#pragma GCC unroll 2
    for (int c = 0; c < 2; ++c) {
      const I32 bits = magnitude_bits(load<F32>(x + i + c * kLanes));
      most[c] = greater_of(bits, most[c]);
    }
  }
  I32 all = greater_of(most[0], most[1]);
#pragma GCC unroll 4
  for (uint32_t step = kLanes / 2; step > 0; step /= 2) {
    all = greater_of(all, __builtin_shuffle(all, (I32)((lane_index() + step) & (kLanes - 1u))));
  }
  int32_t largest = all[0];
  for (; i < n; ++i) {
    const int32_t bits = bit_cast<int32_t>(x[i]) & 0x7fffffff;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

// Loads a vector: `live` values, then zeros.
CGX_HD F32 load_live(const float* x, int64_t live) {
  if (live >= kLanes) return load<F32>(x);
  F32 v = {};
  for (int64_t l = 0; l < live; ++l) v[l] = x[l];
  return v;
}

// Sums `half` values, a power of two, in an order that any implementation can follow: the second
// half of the values is added to the first, until one value is left.
float sum_by_halves(float* values, int64_t half) {
  for (half /= 2; half >= kLanes; half /= 2) {
    for (int64_t i = 0; i < half; i += kLanes) {
      store(values + i, load<F32>(values + i) + load<F32>(values + i + half));
    }
  }
  for (; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) values[i] += values[i + half];
  }
  return values[0];
}

CGX_HD Scale largest_scale(const float* x, int64_t n, float top) {
  return Scale::of_largest(largest_bits(x, n), top);
}

Scale l2_scale(const float* x, int64_t n, int64_t bucket, float top) {
  const Scale one = largest_scale(x, n, 1);
  if (one.factor == 0) return one;
  alignas(kLine) float squares[kLongestBucket / 2 + kLanes];
  int64_t half = 1;
  while (2 * half < bucket) half *= 2;
  if (n == 2 * half && half >= kLanes && one.down == 1) {
    for (int64_t i = 0; i < half; i += kLanes) {
      const F32 a = without_subnormals(load<F32>(x + i)) * one.factor;
      const F32 b = without_subnormals(load<F32>(x + i + half)) * one.factor;
      store(squares + i, a * a + b * b);
    }
  } else {
    const auto square = [&](int64_t i) {
      const F32 part = scaled(one, load_live(x + i, n - i));
      return part * part;
    };
    for (int64_t i = 0; i < half; i += kLanes) {
      store(squares + i, i + half < n && half >= kLanes ? square(i) + square(i + half) : square(i));
    }
    for (int64_t i = half; half < kLanes && i < n; ++i) squares[i - half] += squares[i];
  }
  return Scale::of_squares(one, sum_by_halves(squares, half), top);
}

template <typename Code>
Scale scale_of(const BucketsCall& call, const float* x, int64_t n) {
  if constexpr (Code::kScaled) {
    const float top = Code::top((int32_t)call.levels);
    return call.l2 ? l2_scale(x, n, call.bucket_size, top) : largest_scale(x, n, top);
  }
  return {1};
}

// Collects codes, one byte each, until there are enough to pack into whole bytes.
class CodeWriter {
 public:
  CodeWriter(int width, uint8_t* out) : width_(width), out_(out) {}
  // Where to write the next codes, at most kRoom of them.
  CGX_HD uint8_t* place() { return staged_ + count_; }
  CGX_HD void add(int64_t count) {
    count_ += count;
    if (count_ < kBlock) return;
    write(kBlock);
    count_ -= kBlock;
    store(staged_, load<Tail>(staged_ + kBlock));
  }
  void end() {
    if (count_ == 0) return;
    memset(staged_ + count_, 0, kBlock - count_);  // the last byte is padded with zeros
    write(count_);
  }

 private:
  static constexpr int64_t kBlock = 2560;  // a multiple of 8 codes and of 5
  static constexpr int64_t kRoom = 64;
  struct Tail {
    uint8_t bytes[kRoom];
  };

  __attribute__((noinline)) void write(int64_t count) {
    uint8_t packed[kBlock + kRoom];
    const int64_t bytes = width_ == 0 ? (count + 4) / 5 : (count * width_ + 7) / 8;
    if (width_ == 0) {
      pack_trits(bytes, packed);
    } else if (width_ < 8) {
      pack_bits(bytes, packed);
    }
    memcpy(out_, width_ == 8 ? staged_ : packed, bytes);
    out_ += bytes;
  }
  void pack_trits(int64_t bytes, uint8_t* packed) const {
    int64_t j = 0;
#if defined(__AVX512BW__)
    // Two groups of five in each 16 bytes: words 5 l to 5 l + 7 of every 40 codes.
    alignas(kLine) static constexpr uint16_t kWords[32] = {0, 1, 2,  3,  4,  0,  0,  0,  5,  6,  7,
                                                           8, 9, 0,  0,  0,  10, 11, 12, 13, 14, 0,
                                                           0, 0, 15, 16, 17, 18, 19, 0,  0,  0};
    const __m512i words = _mm512_load_si512(kWords);
    const __m512i spread =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 2, 3, 4, -1, -1, -1, 5, 6, 7, 8, 9, -1, -1, -1));
    const __m512i powers = _mm512_set1_epi64(81ll << 32 | 27 << 24 | 9 << 16 | 3 << 8 | 1);
    for (; j < bytes; j += 8) {
      const __m512i codes = _mm512_loadu_si512(staged_ + 5 * j);
      const __m512i groups = _mm512_shuffle_epi8(_mm512_permutexvar_epi16(words, codes), spread);
      const __m512i pairs = _mm512_maddubs_epi16(groups, powers);
      const __m512i fours = _mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
      const __m512i sums = _mm512_add_epi64(fours, _mm512_srli_epi64(fours, 32));
      _mm_storel_epi64((__m128i*)(packed + j), _mm512_cvtepi64_epi8(sums));
    }
#endif
    // One product adds up five digits, each times its power of 3. The sum is in the fifth byte.
    constexpr uint64_t kPowers = 81 + (27ull << 8) + (9ull << 16) + (3ull << 24) + (1ull << 32);
    for (; j < bytes; ++j) {
      packed[j] = (uint8_t)(load<uint64_t>(staged_ + 5 * j) * kPowers >> 32);
    }
  }
  // Moves neighbors together, then pairs, then fours: eight codes in every 64 bits.
  void pack_bits(int64_t bytes, uint8_t* packed) const {
#if defined(__AVX512BW__)
    if (width_ == 4) {
      for (int64_t i = 0; i < bytes; i += 32) {
        const __m512i pairs = _mm512_loadu_si512(staged_ + 2 * i);
        const __m512i both = _mm512_or_si512(pairs, _mm512_srli_epi16(pairs, 4));
        _mm256_storeu_si256((__m256i*)(packed + i), _mm512_cvtepi16_epi8(both));
      }
      return;
    }
#endif
    const int w = width_;
    const auto ones = [](int bits) { return (uint64_t{1} << bits) - 1; };
    const uint64_t two = ones(w) << w, four = ones(2 * w) << 2 * w, eight = ones(4 * w) << 4 * w;
    const uint64_t in_16 = 0x0001000100010001ull, in_32 = 0x0000000100000001ull;
    for (int64_t i = 0, to = 0; to < bytes; i += 4 * kLanes) {
      U64 v = load<U64>(staged_ + i);
      v = (v & in_16 * 0xff) | (v >> (8 - w) & in_16 * two);
      v = (v & in_32 * 0xffff) | (v >> (16 - 2 * w) & in_32 * four);
      v = (v & 0xffffffffull) | (v >> (32 - 4 * w) & eight);
      for (int l = 0; l < kLanes / 2; ++l, to += w) store(packed + to, (uint64_t)v[l]);
    }
  }

  const int width_;  // bits per code; 0: five codes of three values per byte
  uint8_t* out_;
  int64_t count_ = 0;
  uint8_t staged_[kBlock + 2 * kRoom];
};

// The codes of one bucket.
template <typename Code, bool kUsual>
void write_codes(const BucketsCall& call, const Scale& scale, const float* x, int64_t n,
                 NoiseSeed seed, CodeWriter& writer) {
  constexpr int kVectors = 4;
  const int32_t levels = (int32_t)call.levels;
  int64_t i = 0;
  for (; i + kVectors * kLanes <= n; i += kVectors * kLanes) {
    if (!Code::kScaled) prefetch_l2<kVectors * kLanes * 4>((const char*)(x + i) + kFarAhead);
    uint8_t* const to = writer.place();
#pragma GCC unroll 4
    for (int j = 0; j < kVectors * kLanes; j += kLanes) {
      const U32 noise = random_bits(lane_index() + (uint32_t)(i + j), seed);
      store_u8(to + j, Code::template code<kUsual>(scale, levels, load<F32>(x + i + j), noise));
    }
    writer.add(kVectors * kLanes);
  }
  for (; i < n; i += kLanes) {
    const int64_t live = n - i < kLanes ? n - i : kLanes;
    const U32 noise = random_bits(lane_index() + (uint32_t)i, seed);
    store_u8(writer.place(),
             Code::template code<kUsual>(scale, levels, load_live(x + i, live), noise));
    writer.add(live);
  }
}

template <typename Code>
void encode_coded(const BucketsCall& call, int64_t from, int64_t to) {
  const int64_t bucket_size = call.bucket_size;
  CodeWriter writer(call.width, call.codes + (call.width == 0 ? from / 5 : from * call.width / 8));
  for (int64_t begin = from; begin < to; begin += bucket_size) {
    const int64_t k = begin / bucket_size, rest = to - begin;
    const int64_t n = rest < bucket_size ? rest : bucket_size;
    const float* const x = call.x + begin;
    const NoiseSeed seed = noise_seed(call.key, 0, (uint64_t)k);
    const Scale scale = scale_of<Code>(call, x, n);
    if (Code::kScaled) store(call.scales + 4 * k, scale.value);
    const auto write = scale.usual() ? write_codes<Code, true> : write_codes<Code, false>;
    write(call, scale, x, n, seed, writer);
  }
  writer.end();
}

void encode_buckets(const BucketsCall& call, int64_t from, int64_t to) {
  switch (call.coded) {
    case Coded::kNatural:
      return encode_coded<Natural>(call, from, to);
    case Coded::kTernary:
      return encode_coded<Ternary>(call, from, to);
    case Coded::kSteps:
      return encode_coded<Steps>(call, from, to);
  }
}

}  // namespace
}  // namespace CGX_ISA
}  // namespace cgx

#endif  // CGX_CPU_LEVELS_H_
