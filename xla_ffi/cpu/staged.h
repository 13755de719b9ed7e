// The kernels that stage values in fp32: those for 16-bit values and for slots that are rotated or
// have units, and reduce, which stages its sums. Included only by cpu/kernels.cc; everything lives
// in the instruction set's namespace.
#ifndef CGX_CPU_STAGED_H_
#define CGX_CPU_STAGED_H_

#include <string.h>

#include "cpu/buckets.h"
#include "cpu/rotate.h"
#include "cpu/units.h"
#include "format/runs.h"

namespace cgx {
inline namespace CGX_ISA {
namespace {

// --- the zero segments of a bucket

CGX_HD bool is_zero(float x) { return bit_cast<uint32_t>(x) << 1 == 0; }
CGX_HD bool is_zero(uint16_t x) { return (uint16_t)(x << 1) == 0; }

// Whether a segment can be zero: whether the last value is, or one at a multiple of a kMaskBits-th
// of the bucket. A segment that ends before the bucket has such a value, because none is shorter.
template <typename Item>
CGX_HD bool may_have_zeros(const Item* x, int64_t n, int64_t bucket_size) {
  if (is_zero(x[n - 1])) return true;
  if (n == kUsualValues && bucket_size == kUsualValues) {
#pragma GCC unroll 16
    for (int i = 0; i < kMaskBits; ++i) {
      if (is_zero(x[i * (kUsualValues / kMaskBits)])) return true;
    }
    return false;
  }
  for (int64_t i = 0; i < n; i += bucket_size / kMaskBits) {
    if (is_zero(x[i])) return true;
  }
  return false;
}

// The mask of bucket `k`, whose values begin at x.
template <typename Item>
__attribute__((noinline)) uint32_t scan_segments(const Item* x, const Slot& slot, int64_t k) {
  const int64_t n = slot.bucket_values(k);
  const MaskSegments segments(slot, k);
  uint32_t mask = 0;
  for (int j = 0; segments.begin(j) < n; ++j) {
    int64_t i = segments.begin(j);
    const int64_t end = segments.end(j, n);
    while (i < end && is_zero(x[i])) ++i;
    mask |= (uint32_t)(i == end) << j;
  }
  return mask;
}

template <typename Item>
CGX_HD uint32_t zero_segments(const Item* x, const Slot& slot, int64_t k) {
  if (!may_have_zeros(x, slot.bucket_values(k), slot.bucket_size)) return 0;
  return scan_segments(x, slot, k);
}

CGX_HD uint32_t mask_of(const uint8_t* record) { return load<Header>(record).mask(); }

// Sets the masked values of bucket `k` to 0.
template <typename Item>
CGX_HD void clear_segments(Item* x, const Slot& slot, int64_t k, uint32_t mask) {
  if (mask == 0) return;
  const MaskSegments segments(slot, k);
  const int64_t n = slot.bucket_values(k);
  for (int j = 0; j < kMaskBits && segments.begin(j) < n; ++j) {
    if (mask >> j & 1u) {
      memset(x + segments.begin(j), 0, (segments.end(j, n) - segments.begin(j)) * sizeof(Item));
    }
  }
}

// --- clipped codes of a bucket of the default size, for processors that narrow with saturation

#if defined(__x86_64__)
// Whether scaled levels fit an int32. From two bits on, a clipped range is a good part of the root
// mean square. At one bit it may be far smaller.
constexpr bool saturates(int bits) { return bits > 1; }

// The lanes of four vectors as bytes, saturated to [0, 255]. byte_order() restores their order.
CGX_HD U32 saturated_bytes(const I32 (&x)[4]) {
#if defined(__AVX512F__)
  return (U32)_mm512_packus_epi16(_mm512_packs_epi32((__m512i)x[0], (__m512i)x[1]),
                                  _mm512_packs_epi32((__m512i)x[2], (__m512i)x[3]));
#elif defined(__AVX2__)
  return (U32)_mm256_packus_epi16(_mm256_packs_epi32((__m256i)x[0], (__m256i)x[1]),
                                  _mm256_packs_epi32((__m256i)x[2], (__m256i)x[3]));
#else
  return (U32)_mm_packus_epi16(_mm_packs_epi32((__m128i)x[0], (__m128i)x[1]),
                               _mm_packs_epi32((__m128i)x[2], (__m128i)x[3]));
#endif
}
CGX_HD U32 byte_order(U32 bytes) {
  constexpr uint32_t kParts = kLanes / 4;  // of 128 bits, each with four bytes of every vector
  const U32 lane = lane_index();
  return __builtin_shuffle(bytes, (I32)(lane % kParts * 4u + lane / kParts));
}

// x * scale + scale / 2 with one rounding; `scale` is a power of two.
CGX_HD F32 scaled_level(F32 x, float scale) {
#if defined(__AVX512F__)
  return (F32)_mm512_fmadd_ps((__m512)x, _mm512_set1_ps(scale), _mm512_set1_ps(scale / 2));
#elif defined(__FMA__)
  return (F32)_mm256_fmadd_ps((__m256)x, _mm256_set1_ps(scale), _mm256_set1_ps(scale / 2));
#else
  return x * scale + scale / 2;
#endif
}

// Writes the same planes as encode_bucket. A level is scaled so that its code is the upper bits of
// a byte, and narrowing to a byte clips it. Each row is a vector of bytes, from which the planes
// take their bits.
template <int kBits>
__attribute__((noinline)) void encode_clipped(const float* x, Meta meta, Ahead ahead,
                                              uint8_t* planes) {
  constexpr int64_t kWidth = 4 * kLanes, kBytes = kWidth * sizeof(*x);
  constexpr int64_t kFarBytes = kBytes * far_quarters(Coding::kClipped) / 4, kPair = 2 * kLine;
  const float inverse = inverse_unit(meta);
  ahead.far += kUsualValues * sizeof(*x) - kUsualColumns / kWidth * kRows * kFarBytes;
#pragma GCC unroll 1
  for (int64_t column = 0; column < kUsualColumns; column += kWidth) {
    U32 plane[kBits] = {};
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      prefetch_l1<kBytes>(ahead.near + r * kBytes);
      if (r * kFarBytes % kPair == 0) prefetch_l2<kPair>(ahead.far + r * kFarBytes);
      __asm__ volatile("" ::: "memory");  // keeps the compiler from moving all prefetches up
      I32 level[4];
#pragma GCC unroll 4
      for (int v = 0; v < 4; ++v) {
        const F32 value = load<F32>(x + r * kUsualColumns + column + v * kLanes);
        const F32 scaled = scaled_level((value - meta.lo) * inverse, 1 << (8 - kBits));
        level[v] = (I32)Lanes<F32>::truncate(scaled);
      }
      const U32 code = saturated_bytes(level);
#pragma GCC unroll 8
      for (int j = 0; j < kBits; ++j) {
        const int first = r * kBits - 8 * j, last = first + kBits;
        if (last <= 0 || first >= 8) continue;
        const uint32_t mask = (1u << (last < 8 ? last : 8)) - (1u << (first > 0 ? first : 0));
        const U32 bits = last < 8 ? code >> (8 - last) : code << (last - 8);
        plane[j] |= bits & (mask * 0x01010101u);
      }
    }
#pragma GCC unroll 8
    for (int j = 0; j < kBits; ++j)
      store(planes + j * kUsualColumns + column, byte_order(plane[j]));
    ahead.near += kRows * kBytes;
    ahead.far += kRows * kFarBytes;
  }
}
#else
constexpr bool saturates(int) { return false; }
#endif

// --- any codes

// The record of a rotated bucket, in which every place of every column holds a code.
CGX_HD Record filled(Record record) { return {kRows * record.columns(), record.bits}; }

// Encodes a bucket of fp32 values, which are already rotated if the slot asks for it. With
// kResidual the encoding error replaces the values.
template <int kBits, Coding kCoding, bool kResidual>
void encode_values(float* x, Record record, Meta meta, Noise noise, Ahead ahead, uint8_t* planes) {
  constexpr bool kSaturated = kCoding == Coding::kClipped && !kResidual && saturates(kBits);
  if constexpr (kSaturated) {
    if (usual(record) && !poisoned(meta)) return encode_clipped<kBits>(x, meta, ahead, planes);
  }
  constexpr int kColumns = kSaturated ? 0 : kUsualColumns;
  const auto encode = usual(record) ? encode_bucket<kBits, kCoding, kResidual, kColumns>
                                    : encode_bucket<kBits, kCoding, kResidual, 0>;
  encode(x, record, meta, noise, ahead, planes, kResidual ? x : nullptr);
}

bool clipped(const Slot& slot, Record record) {
  return slot.rotated && slot.rounding == Rounding::kNearest && Rotation::whole(record.columns());
}

Meta meta_of(const float* x, const Slot& slot, Record record, Extremes found) {
  if (!clipped(slot, record)) return found.meta(slot.bits);
  const float down = Scaling(found.min, found.max).down;
  const float squares = sum_squares(x, static_cast<int>(record.columns()), down);
  return make_clipped_meta(found.min, found.max, found.finite, squares, record.values, slot.bits);
}

// Writes a whole record.
template <int kBits, bool kResidual>
void encode_values(float* x, const Slot& slot, Record record, Header header, Noise noise,
                   Ahead ahead, uint8_t* out) {
  store(out, header);
  const Meta meta = header.meta();
  uint8_t* const planes = Record::planes(out);
  if (slot.rounding != Rounding::kNearest) {
    encode_values<kBits, Coding::kStochastic, kResidual>(x, record, meta, noise, ahead, planes);
  } else if (clipped(slot, record)) {
    encode_values<kBits, Coding::kClipped, kResidual>(x, record, meta, noise, ahead, planes);
  } else {
    encode_values<kBits, Coding::kNearest, kResidual>(x, record, meta, noise, ahead, planes);
  }
}

CGX_HD Rotation rotation_of(const Slot& slot, LeafSeed signs, int64_t bucket) {
  return Rotation(slot.record(bucket).columns(), signs, (uint64_t)bucket);
}

CGX_HD Noise noise_of(const Slot& slot, const uint32_t* key, int64_t bucket, float offset) {
  if (slot.rounding == Rounding::kNearest) return {};
  return {noise_seed(key, slot.number, (uint64_t)bucket), offset};
}

// Writes bucket k of a slot to `out`, ready for encoding. Returns its extremes.
template <typename Store>
Extremes stage_values(const typename Store::Item* x, const Slot& slot, LeafSeed signs, int64_t k,
                      const Factors& in, float* out) {
  const Record record = slot.record(k);
  if (slot.rotated && usual(record)) {
    const Rotation rotation = rotation_of(slot, signs, k);
    const char* const ahead = (const char*)x + kFarAhead;
    if (in.none()) return rotate_usual<Store, false>(x, nullptr, rotation, ahead, out);
    alignas(kLine) float factor[kUsualValues];
    in.fill(k * slot.bucket_size, kUsualValues, factor);
    return rotate_usual<Store, true>(x, factor, rotation, ahead, out);
  }
  const Extremes found = read_values<Store>(x, record.values, in, k * slot.bucket_size, out);
  if (!slot.rotated) return found;
  rotate(out, record, rotation_of(slot, signs, k));
  return find_extremes<StoreF32, false>(out, filled(record).values);
}

constexpr int64_t kStaged = 4;

// Encodes values that are staged in fp32.
template <typename Store, bool kResidual>
struct EncodeStaged {
  using Item = typename Store::Item;
  template <int kBits>
  static void run(const EncodeCall& call, const Run& run) {
    const Slot& slot = run.slot;
    const LeafSeed signs = Rotation::leaf_seed(slot.number);
    const Item* x = (const Item*)call.leaves.data[run.leaf] + run.first_value();
    Item* residual = kResidual ? (Item*)call.residuals.data[run.leaf] + run.first_value() : nullptr;
    uint8_t* out = call.payload + run.offset;
    const float offset = noise_offset(slot.rounding, call.rank, call.layout.world);
    const Factors in(call.units, run.leaf, kIn), back(call.units, run.leaf, kOut);
    // Several buckets at a time: while one waits for its range and unit, another can proceed.
    const bool usual_size = slot.bucket_size == kUsualValues;
    const bool nontemporal = call.layout.values > kNontemporalValues && usual_size;
    const int64_t group = usual_size ? kStaged : 1;
    alignas(kLine) float staged[kStaged][kUsualValues];
    Stage<kStaged * Record{kUsualValues, kBits}.bytes()> records;
    for (int64_t first = run.first; first < run.last; first += group) {
      const int64_t last = first + group < run.last ? first + group : run.last;
      float* value[kStaged];
      Extremes found[kStaged];
      Header header[kStaged];
      uint32_t mask[kStaged];
      for (int64_t k = first, i = 0; k < last; ++k, ++i) {
        value[i] = usual_size ? staged[i] : call.scratch;
        const Item* const from = x + i * slot.bucket_size;
        found[i] = stage_values<Store>(from, slot, signs, k, in, value[i]);
        mask[i] = zero_segments(from, slot, k);
      }
      const auto coded = [&](int64_t k) {
        return slot.rotated ? filled(slot.record(k)) : slot.record(k);
      };
      for (int64_t k = first, i = 0; k < last; ++k, ++i) {
        header[i] = Header(meta_of(value[i], slot, coded(k), found[i]), mask[i], kBits);
      }
      uint8_t* const group_out = nontemporal ? records.at(out) : out;
      int64_t bytes = 0;
      for (int64_t k = first, i = 0; k < last; ++k, ++i) {
        const Record record = slot.record(k);
        const Noise noise = noise_of(slot, call.key, k, offset);
        const Ahead ahead{(const char*)(x + group * slot.bucket_size), (const char*)x + kFarAhead};
        encode_values<kBits, kResidual>(value[i], slot, coded(k), header[i], noise, ahead,
                                        group_out + bytes);
        if (kResidual) {
          if (slot.rotated) rotate_back(value[i], record.columns(), rotation_of(slot, signs, k));
          write_lost<Store>(value[i], record.values, 1.0f, back, k * slot.bucket_size, residual);
          clear_segments(residual, slot, k, header[i].mask());
          residual += record.values;
        }
        x += record.values;
        bytes += record.bytes();
      }
      if (nontemporal) records.store_nontemporal(out, bytes);
      out += bytes;
    }
  }
};

// Whether the loops over a bucket read and write the items themselves.
template <typename Store>
constexpr bool kDirect = sizeof(typename Store::Item) == sizeof(float);

// What the peers sent for one bucket, without `skip`.
struct Peers {
  const uint8_t* records;
  int64_t stride, count, skip;
};

// The masks of the peers' records: the bits that any of them has, and those that all have.
struct Masks {
  uint32_t any = 0, all = (1u << kMaskBits) - 1;
};

Masks masks_of(const Peers& peers) {
  Masks masks;
  for (int64_t peer = 0; peer < peers.count; ++peer) {
    if (peer == peers.skip) continue;
    const uint32_t mask = mask_of(peers.records + peer * peers.stride);
    masks.any |= mask;
    masks.all &= mask;
  }
  return masks;
}

// Writes (x + the peers' values) / divisor, for peers without masks.
template <int kBits>
void add_peers(const float* x, Record coded, const Peers& peers, Divide divide, const char* ahead,
               float* out) {
  const auto sum = usual(coded) ? sum_bucket<kBits, kUsualColumns> : sum_bucket<kBits, 0>;
  sum(x, coded, peers.records, peers.stride, peers.count, peers.skip, divide, ahead, out);
}

// Adds the peers' values to `sums`, in rank order. In a record with a mask some values are 0. Those
// of a rotated bucket are so only when rotated back, and the result is then rotated again. Behind
// the bucket's values, `sums` has room for as many more.
template <int kBits>
void add_masked(float* sums, const Slot& slot, int64_t k, const Peers& peers) {
  const Record record = slot.record(k), coded = slot.rotated ? filled(record) : record;
  const Rotation rotation = rotation_of(slot, Rotation::leaf_seed(slot.number), k);
  float* const values = sums + kRows * record.columns();
  for (int64_t peer = 0; peer < peers.count; ++peer) {
    if (peer == peers.skip) continue;
    const uint8_t* const from = peers.records + peer * peers.stride;
    const uint32_t mask = mask_of(from);
    if (mask == 0) {
      const Peers one{from, 0, 1, -1};
      add_peers<kBits>(sums, coded, one, Divide(1.0f), (const char*)sums, sums);
      continue;
    }
    decode_bucket<kBits, 0>(from, coded, values);
    if (slot.rotated) rotate_back(values, record.columns(), rotation);
    clear_segments(values, slot, k, mask);
    if (slot.rotated) rotate(values, record, rotation);
    add_into<StoreF32>(sums, values, coded.values, Divide(1.0f), sums);
  }
}

template <typename Store>
struct Reduce {
  using Item = typename Store::Item;
  template <int kBits>
  static void run(const ReduceCall& call, const Run& run) {
    const Slot& slot = run.slot;
    const LeafSeed signs = Rotation::leaf_seed(slot.number);
    const Layout& layout = call.layout;
    const Item* x = (const Item*)call.leaves.data[run.leaf] + run.first_value();
    const Divide divide(call.divisor);
    const bool residual = call.residuals.data != nullptr;
    Item* lost = residual ? (Item*)call.residuals.data[run.leaf] + run.first_value() : nullptr;
    const Factors in(call.units, run.leaf, kIn), back(call.units, run.leaf, kOut);
    const bool staged = !kDirect<Store> || slot.rotated || !in.none();
    int64_t position = run.offset - run.chunk * layout.chunk_bytes;
    for (int64_t k = run.first; k < run.last; ++k) {
      const Record record = slot.record(k), coded = slot.rotated ? filled(record) : record;
      const Peers peers{call.payload + position, layout.chunk_bytes, layout.world, call.rank};
      const Masks masks = masks_of(peers);
      if (staged || masks.any) stage_values<Store>(x, slot, signs, k, in, call.scratch);
      const char* const ahead = (const char*)x;
      if (masks.any) {
        add_masked<kBits>(call.scratch, slot, k, peers);
        write_quotients<StoreF32>(call.scratch, coded.values, divide, call.scratch);
      } else {
        const float* const own = staged ? call.scratch : (const float*)x;
        add_peers<kBits>(own, coded, peers, divide, ahead, call.scratch);
      }
      const uint32_t mask = masks.all ? masks.all & zero_segments(x, slot, k) : 0;
      const Noise noise = noise_of(slot, call.key, k, 0.0f);
      const auto encode = residual ? encode_values<kBits, true> : encode_values<kBits, false>;
      const Extremes found = find_extremes<StoreF32, false>(call.scratch, coded.values);
      const Header header(meta_of(call.scratch, slot, coded, found), mask, kBits);
      encode(call.scratch, slot, coded, header, noise, {ahead + kNearAhead, ahead + kFarAhead},
             call.chunk + position);
      x += record.values;
      if (residual) {
        if (slot.rotated) rotate_back(call.scratch, record.columns(), rotation_of(slot, signs, k));
        write_lost<Store>(call.scratch, record.values, call.divisor, back, k * slot.bucket_size,
                          lost);
        clear_segments(lost, slot, k, header.mask());
        lost += record.values;
      }
      position += record.bytes();
    }
  }
};

template <typename Store>
struct DecodeStaged {
  using Item = typename Store::Item;
  template <int kBits>
  static void run(const DecodeCall& call, const Run& run) {
    const Slot& slot = run.slot;
    const LeafSeed signs = Rotation::leaf_seed(slot.number);
    const uint8_t* from = call.payload + run.offset;
    Item* out = (Item*)call.leaves.data[run.leaf] + run.first_value();
    const Factors back(call.units, run.leaf, kOut);
    const bool nontemporal = call.layout.values > kNontemporalValues;
    Stage<kUsualValues * sizeof(Item)> values;
    alignas(kLine) float factor[kUsualValues] = {};
    for (int64_t k = run.first; k < run.last; ++k) {
      const Record record = slot.record(k), coded = slot.rotated ? filled(record) : record;
      const bool staged = nontemporal && usual(record);
      Item* const to = staged ? values.at(out) : out;
      const bool fast = slot.rotated && usual(record);
      const Rotation rotation = rotation_of(slot, signs, k);
      if (fast) {
        decode_turned<kBits>(from, rotation, call.scratch);
      } else {
        const auto decode =
            usual(coded) ? decode_bucket<kBits, kUsualColumns> : decode_bucket<kBits, 0>;
        decode(from, coded, call.scratch);
        if (slot.rotated) rotate_back(call.scratch, record.columns(), rotation);
      }
      if (fast) {
        auto finish = finish_back<Store, Finish::kDecoded>;
        if (!back.none()) {
          finish = finish_back<Store, Finish::kInUnits>;
          back.fill(k * slot.bucket_size, kUsualValues, factor);
        } else if (stays_finite(checked(load<Header>(from).meta()), kBits, rotation)) {
          finish = finish_back<Store, Finish::kAsIs>;
        }
        finish(call.scratch, factor, kUsualColumns, 0, rotation, to);
      } else if (slot.rotated || !back.none()) {
        write_decoded<Store>(call.scratch, record.values, back, k * slot.bucket_size, to);
      } else {
        write_quotients<Store>(call.scratch, record.values, Divide(1.0f), to);
      }
      clear_segments(to, slot, k, mask_of(from));
      if (staged) values.store_nontemporal(out, record.values * sizeof(Item));
      from += record.bytes();
      out += record.values;
    }
  }
};

}  // namespace
}  // namespace CGX_ISA
}  // namespace cgx

#endif  // CGX_CPU_STAGED_H_
