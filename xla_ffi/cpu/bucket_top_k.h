// The values of largest magnitude in each bucket. Included only by cpu/codes.cc; everything lives
// in the instruction set's namespace.
#ifndef CGX_CPU_BUCKET_TOP_K_H_
#define CGX_CPU_BUCKET_TOP_K_H_

#include "cpu/masks.h"
#include "format/codes.h"

namespace cgx {
inline namespace CGX_ISA {
namespace {

// The magnitudes of one bucket, as bits. Zeros fill them up to the bucket's size, and -1 from there
// to whole vectors.
struct Magnitudes {
  alignas(kLine) int32_t bits[kLongestBucket];
  int64_t size;  // in whole vectors
  I32 most;      // largest magnitude of each lane

  CGX_HD void read(const float* x, int64_t live, int64_t bucket_size) {
    size = (bucket_size + kLanes - 1) / kLanes * kLanes;
    most = I32{} - 1;
    int64_t i = 0;
    for (; i + kLanes <= live; i += kLanes) {
      prefetch_l2<kLanes * 4>((const char*)(x + i) + kFarAhead);
      const I32 part = magnitude_bits(load<F32>(x + i));
      most = greater_of(most, part);
      store(bits + i, part);
    }
    const int64_t rest = i;
    for (; i < live; ++i) bits[i] = bit_cast<int32_t>(x[i]) & 0x7fffffff;
    for (; i < size; ++i) bits[i] = i < bucket_size ? 0 : -1;
    for (i = rest; i < size; i += kLanes) most = greater_of(most, load<I32>(bits + i));
  }

  int64_t count(int32_t least) const {
    int64_t found = 0;
    for (int64_t i = 0; i < size; i += kLanes) {
      found += __builtin_popcount(at_least(load<I32>(bits + i), least));
    }
    return found;
  }

  // The k-th largest of the lanes' maxima, which is at most the k-th largest of all.
  CGX_HD int32_t bound(int64_t k) const {
    I32 larger = {};
#pragma GCC unroll 16
    for (uint32_t step = 1; step < kLanes; ++step) {
      const I32 other = __builtin_shuffle(most, (I32)((lane_index() + step) & (kLanes - 1u)));
      larger -= other > most;
    }
    I32 least = larger < (int32_t)k ? most : I32{} + 0x7fffffff;
#pragma GCC unroll 4
    for (uint32_t step = kLanes / 2; step > 0; step /= 2) {
      least =
          lesser_of(least, __builtin_shuffle(least, (I32)((lane_index() + step) & (kLanes - 1u))));
    }
    return least[0] < 0 ? 0 : least[0];
  }

  // The k-th largest, found bit by bit.
  __attribute__((noinline)) int32_t exact(int64_t k) const {
    int32_t least = 0;
    for (int bit = 30; bit >= 0; --bit) {
      const int32_t more = least | 1 << bit;
      if (count(more) >= k) least = more;
    }
    return least;
  }

  // Writes the first `room` places whose magnitudes are at least `least`. Returns how many such
  // places there are in total.
  CGX_HD int64_t places(int32_t least, int64_t room, int32_t* at) const {
    constexpr int64_t kWord = 64;
    int64_t found = 0;
    for (int64_t i = 0; i < size; i += kWord) {
      uint64_t mask = 0;
      if (i + kWord <= size) {
#pragma GCC unroll 16
        for (int64_t j = 0; j < kWord; j += kLanes) {
          mask |= (uint64_t)at_least(load<I32>(bits + i + j), least) << j;
        }
      } else {
        for (int64_t j = 0; i + j < size; j += kLanes) {
          mask |= (uint64_t)at_least(load<I32>(bits + i + j), least) << j;
        }
      }
      for (; mask != 0; mask &= mask - 1, ++found) {
        if (found < room) at[found] = (int32_t)(i + __builtin_ctzll(mask));
      }
    }
    return found;
  }
};

// Writes the places in the bucket of its k largest magnitudes, in order. Of equal ones it takes the
// first.
CGX_HD void top_k(const Magnitudes& all, int64_t k, int32_t* at) {
  constexpr int64_t kFew = 64;
  int32_t near[kFew];
  int64_t found = kFew + 1;
  if (k <= kLanes) found = all.places(all.bound(k), kFew, near);
  if (found > kFew) {  // many are equal, or k is large
    const int32_t least = all.exact(k);
    int64_t ties = k - all.count(least + 1), next = 0;
    for (int64_t i = 0; next < k; ++i) {
      if (all.bits[i] < least || (all.bits[i] == least && ties-- <= 0)) continue;
      at[next++] = (int32_t)i;
    }
    return;
  }
  for (; found > k; --found) {  // drop the smallest; of equal ones the last
    int64_t worst = 0;
    for (int64_t i = 1; i < found; ++i) {
      if (all.bits[near[i]] <= all.bits[near[worst]]) worst = i;
    }
    for (int64_t i = worst; i + 1 < found; ++i) near[i] = near[i + 1];
  }
  for (int64_t i = 0; i < k; ++i) at[i] = near[i];
}

void largest_of_buckets(const float* x, int64_t n, int64_t bucket_size, int64_t keep, int64_t from,
                        int64_t to, int32_t* at, float* taken) {
  Magnitudes all;
  for (int64_t k = from; k < to; ++k) {
    const float* const bucket = x + k * bucket_size;
    const int64_t rest = n - k * bucket_size, live = rest < bucket_size ? rest : bucket_size;
    all.read(bucket, live, bucket_size);
    top_k(all, keep, at + k * keep);
    for (int64_t i = k * keep; i < (k + 1) * keep; ++i) {
      taken[i] = at[i] < live ? bucket[at[i]] : 0.0f;
    }
  }
}

}  // namespace
}  // namespace CGX_ISA
}  // namespace cgx

#endif  // CGX_CPU_BUCKET_TOP_K_H_
