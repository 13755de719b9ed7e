// The kernels of codes.h. A warp writes whole bytes, so warps share nothing.
#include <numeric>

#include "cuda/codes.h"
#include "cuda/units.h"
#include "format/levels.h"

namespace cgx {
namespace {

template <typename Word>
__device__ void store_words(uint8_t* to, uint64_t& bits, int& at, int count) {
  constexpr int kBytes = sizeof(Word);
  if (reinterpret_cast<uintptr_t>(to) % kBytes != 0) return;
  for (; at + kBytes <= count; at += kBytes, bits >>= 8 * kBytes) {
    *reinterpret_cast<Word*>(to + at) = static_cast<Word>(bits);
  }
}

// Stores the lowest `count` bytes, in words as long as the address allows.
__device__ void store_bytes(uint8_t* to, uint64_t bits, int count) {
  int at = 0;
  store_words<uint32_t>(to, bits, at, count);
  store_words<uint16_t>(to, bits, at, count);
  store_words<uint8_t>(to, bits, at, count);
}

// --- multiples of a norm

// The lane's part of the sum that sum_by_halves computes: the second half of a power of two of
// values is added to the first half, until one value is left. Extra zeros change nothing. The lane
// has kPlaces values; this adds up those at `place`, `place` + kStride and so on.
template <int kPlaces, int kStride = 1>
__device__ __forceinline__ float add_squares(const Scale& one, const float* x, int live,
                                             int place = 0) {
  if constexpr (kStride < kPlaces) {
    const float sum = add_squares<kPlaces, 2 * kStride>(one, x, live, place);
    return sum + add_squares<kPlaces, 2 * kStride>(one, x, live, place + kStride);
  } else {
    const int i = place * kWarp + lane_index();
    const float value = i < live ? scaled(one, x[i]) : 0.0f;
    return value * value;
  }
}

__device__ float sum_of_squares(const Scale& one, const float* x, int live) {
  float sum = live <= kTile ? add_squares<kSlots>(one, x, live)
                            : add_squares<kLongestBucket / kWarp>(one, x, live);
#pragma unroll
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    sum += __shfl_xor_sync(kEveryLane, sum, lanes);
  }
  return sum;
}

__device__ Scale scale_of(const BucketsCall& call, const float* x, int live) {
  int32_t largest = 0;
  for (int first = 0; first < live; first += kTile) {
    float values[kSlots];
#pragma unroll
    for (int k = 0; k < kSlots; ++k) {
      const int i = first + k * kWarp + lane_index();
      values[k] = i < live ? x[i] : 0.0f;
    }
#pragma unroll
    for (const float value : values) largest = max(largest, magnitude_bits(value));
  }
  largest = __reduce_max_sync(kEveryLane, largest);
  const float top = Steps::top(static_cast<int32_t>(call.levels));
  if (call.l2) {
    const Scale one = Scale::of_largest(largest, 1);
    if (one.factor == 0) return one;
    return Scale::of_squares(one, sum_of_squares(one, x, live), top);
  }
  return Scale::of_largest(largest, top);
}

// What the codes of a bucket's values depend on.
struct Coding {
  Scale scale;
  NoiseSeed noise;

  // Chooses member by member: a choice between the two objects would put both into memory.
  __device__ static Coding either(bool first, const Coding& a, const Coding& b) {
    return {{first ? a.scale.value : b.scale.value, first ? a.scale.down : b.scale.down,
             first ? a.scale.factor : b.scale.factor},
            {first ? a.noise.s0 : b.noise.s0, first ? a.noise.s1 : b.noise.s1}};
  }
};

constexpr int kCodes = 8;  // these make `width` whole bytes

// A run is as many buckets as make whole bytes. This holds its values, its codes and the number of
// its first bucket.
struct Run {
  const float* x;
  uint8_t* out;
  int64_t bucket;
  int live;      // values up to the end of the run or of the array
  bool aligned;  // four values may be read at once
};

// Encodes the groups that begin in bucket `b` of a run. The last one may end in the next bucket.
__device__ void encode_groups(const BucketsCall& call, const Run& run, int b, const Coding& own,
                              const Coding& next) {
  const int size = static_cast<int>(call.bucket_size), begin = b * size;
  const int levels = static_cast<int>(call.levels);
  const int end = min(begin + size, run.live);
  for (int g = (begin + kCodes - 1) / kCodes + lane_index(); g * kCodes < end; g += kWarp) {
    const int first = g * kCodes;
    float x[kCodes];
    if (run.aligned && first + kCodes <= run.live) {
      const float4* const fours = reinterpret_cast<const float4*>(run.x + first);
      const float4 low = fours[0], high = fours[1];
      const float both[] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int j = 0; j < kCodes; ++j) x[j] = both[j];
    } else {
#pragma unroll
      for (int j = 0; j < kCodes; ++j) x[j] = first + j < run.live ? run.x[first + j] : 0.0f;
    }
    uint64_t codes = 0;
#pragma unroll
    for (int j = 0; j < kCodes; ++j) {
      const int i = first + j - begin;
      const bool here = i < size;
      const Coding coding = Coding::either(here, own, next);
      const uint32_t noise = random_bits(static_cast<uint32_t>(here ? i : i - size), coding.noise);
      const uint32_t code = Steps::code<false>(coding.scale, levels, x[j], noise);
      if (first + j < run.live) codes |= static_cast<uint64_t>(code) << (call.width * j);
    }
    store_bytes(run.out + static_cast<int64_t>(g) * call.width, codes,
                (min(run.live - first, kCodes) * call.width + 7) / 8);
  }
}

__device__ Coding coding_of(const BucketsCall& call, LeafSeed seed, const Run& run, int b) {
  const int size = static_cast<int>(call.bucket_size), live = min(run.live - b * size, size);
  if (live <= 0) return {};
  const int64_t bucket = run.bucket + b;
  const Scale scale = scale_of(call, run.x + b * size, live);
  if (lane_index() < 4) {
    call.scales[4 * bucket + lane_index()] =
        static_cast<uint8_t>(bit_cast<uint32_t>(scale.value) >> (8 * lane_index()));
  }
  return {scale, seed.bucket(bucket)};
}

__global__ void __launch_bounds__(kThreads)
    encode_steps_kernel(const BucketsCall call, int buckets, int64_t runs) {
  const LeafSeed seed(call.key[0], call.key[1], 0);
  const int64_t values = buckets * call.bucket_size;
  const int64_t bytes = values / kCodes * call.width;
  for_each_unit(runs, [&](int64_t number) {
    const float* const x = call.x + number * values;
    const Run run = {x, call.codes + number * bytes, number * buckets,
                     static_cast<int>(min(call.n - number * values, values)),
                     reinterpret_cast<uintptr_t>(x) % sizeof(float4) == 0};
    Coding own = coding_of(call, seed, run, 0);
    for (int b = 0; b < buckets; ++b) {
      const Coding next = b + 1 < buckets ? coding_of(call, seed, run, b + 1) : Coding{};
      encode_groups(call, run, b, own, next);
      own = next;
    }
  });
}

// --- the largest of each bucket

// The magnitudes of a bucket's values, as bits: 0 for values that the last bucket lacks, and -1
// past the bucket's end. A bucket of one tile stays in registers.
template <bool kHeld>
class Magnitudes {
 public:
  __device__ Magnitudes(const float* x, int live, int size) : x_(x), live_(live), size_(size) {
    if constexpr (kHeld) read(0, held_);
  }
  // Calls f(magnitude, place of lane 0's value) for each of a lane's values, in order.
  template <typename F>
  __device__ void each(F f) const {
    if constexpr (kHeld) {
      each_of(0, held_, f);
    } else {
      for (int first = 0; first < size_; first += kTile) {
        int32_t tile[kSlots];
        read(first, tile);
        each_of(first, tile, f);
      }
    }
  }
  // How many have at least these bits.
  __device__ int count(int32_t least) const {
    int found = 0;
    each([&](int32_t bits, int) { found += bits >= least; });
    return __reduce_add_sync(kEveryLane, found);
  }

 private:
  __device__ void read(int first, int32_t (&tile)[kSlots]) const {
#pragma unroll
    for (int k = 0; k < kSlots; ++k) {
      const int i = first + k * kWarp + lane_index();
      tile[k] = i < live_ ? magnitude_bits(x_[i]) : i < size_ ? 0 : -1;
    }
  }
  template <typename F>
  __device__ static void each_of(int first, const int32_t (&tile)[kSlots], F f) {
#pragma unroll
    for (int k = 0; k < kSlots; ++k) f(tile[k], first + k * kWarp);
  }

  const float* const x_;
  const int live_, size_;
  int32_t held_[kHeld ? kSlots : 1];
};

// The bits of a bound that the k largest magnitudes reach, found bit by bit until no other value
// reaches it. `ties` is how many values that equal the bound are among the k.
struct Bound {
  int32_t bits = 0;
  int ties;

  template <bool kHeld>
  __device__ Bound(const Magnitudes<kHeld>& all, int size, int k) : ties(size) {
    int reached = size;
    for (int bit = 30; bit >= 0 && reached > k; --bit) {
      const int count = all.count(bits | 1 << bit);
      if (count < k) continue;
      bits |= 1 << bit;
      reached = count;
    }
    if (reached > k) ties = k - all.count(bits + 1);
  }
};

template <bool kHeld>
__global__ void __launch_bounds__(kThreads)
    largest_of_buckets_kernel(const float* x, int64_t n, int size, int keep, int32_t* at,
                              float* taken, int64_t buckets) {
  for_each_unit(buckets, [&](int64_t bucket) {
    const float* const from = x + bucket * size;
    const int live = static_cast<int>(min(n - bucket * size, static_cast<int64_t>(size)));
    const Magnitudes<kHeld> all(from, live, size);
    const Bound bound(all, size, keep);
    const unsigned before = (1u << lane_index()) - 1;
    int64_t next = bucket * keep;
    int ties = bound.ties;
    all.each([&](int32_t bits, int first) {
      const unsigned equal = __ballot_sync(kEveryLane, bits == bound.bits);
      const bool takes = bits > bound.bits || (bits == bound.bits && __popc(equal & before) < ties);
      const unsigned takers = __ballot_sync(kEveryLane, takes);
      if (takes) {
        const int place = first + lane_index();
        const int64_t to = next + __popc(takers & before);
        at[to] = place;
        taken[to] = place < live ? from[place] : 0.0f;
      }
      next += __popc(takers);
      ties -= __popc(equal);
    });
  });
}

}  // namespace

cudaError_t launch_encode_steps(const BucketsCall& call, cudaStream_t stream) {
  const int64_t values = std::lcm(call.bucket_size, int64_t{kCodes});
  return launch(encode_steps_kernel, (call.n + values - 1) / values, stream, call,
                static_cast<int>(values / call.bucket_size));
}

cudaError_t launch_largest_of_buckets(const float* x, int64_t n, int64_t bucket_size, int64_t keep,
                                      int32_t* at, float* taken, cudaStream_t stream) {
  const auto kernel =
      bucket_size <= kTile ? largest_of_buckets_kernel<true> : largest_of_buckets_kernel<false>;
  return launch(kernel, (n + bucket_size - 1) / bucket_size, stream, x, n,
                static_cast<int>(bucket_size), static_cast<int>(keep), at, taken);
}

}  // namespace cgx
