// The selection of codes.h: a radix search for the bound, whose first digit contains the exponent,
// then a compaction in order. Every pass reads the array once. What one pass leaves for the next
// lies in the call's scratch.
#include "cuda/codes.h"
#include "cuda/units.h"
#include "format/levels.h"

namespace cgx {
namespace {

constexpr int kDigitBits = 11, kDigits = 1 << kDigitBits;
constexpr int kChunks = 2048;  // a warp counts and writes one chunk by itself

// The scratch of a call.
struct Selection {
  uint32_t bits;             // of the bound, those found so far
  uint32_t rank;             // of the bound among the values that share these bits
  uint32_t counts[kDigits];  // of the next digit
  uint32_t found[kChunks][2];
};
static_assert(sizeof(Selection) == 4 * kScratchWords, "the header tells the size");

struct Sample {
  const int32_t* first;  // null: 0
  int64_t stride, count;
};

__device__ int64_t turn_of(const int32_t* turn, int64_t n) {
  return turn ? min(max(static_cast<int64_t>(*turn), int64_t{0}), n - 1) : 0;
}

__global__ void __launch_bounds__(kThreads)
    begin_kernel(uint32_t rank, Selection* state, int64_t units) {
  for_each_unit(units, [&](int64_t) {
    for (int i = lane_index(); i < kDigits; i += kWarp) state->counts[i] = 0;
    if (lane_index() > 0) return;
    state->bits = 0;
    state->rank = rank;
  });
}

// Counts the digits at `shift` of the magnitudes that share the bits found before. Each warp counts
// in its own shared memory.
__global__ void __launch_bounds__(kThreads)
    count_digits_kernel(const float* x, int64_t n, const Sample sample, int shift, int width,
                        Selection* state, int64_t units) {
  __shared__ uint32_t all[kThreads / kWarp][kDigits];
  uint32_t* const counts = all[threadIdx.x / kWarp];
  const uint32_t bits = state->bits, most = (1u << width) - 1;
  const int64_t turn = turn_of(sample.first, n);
  for_each_unit(units, [&](int64_t unit) {
    for (int i = lane_index(); i < kDigits; i += kWarp) atomicExch(&counts[i], 0u);
    __syncwarp();
    for (int64_t first = unit * kTile; first < sample.count; first += units * kTile) {
      uint32_t values[kSlots];
#pragma unroll
      for (int k = 0; k < kSlots; ++k) {
        const int64_t i = first + k * kWarp + lane_index(), place = turn + i * sample.stride;
        // Where there is no value: a number past all digits.
        values[k] = i < sample.count ? magnitude_bits(x[place < n ? place : place - n]) : ~0u;
      }
#pragma unroll
      for (const uint32_t value : values) {
        const uint32_t digit = value >> shift & most;
        const bool counted = value >> shift >> width == bits;
        // An array may have many zeros, so a warp's equal digits are counted at once.
        const uint32_t same = __shfl_sync(kEveryLane, digit, 0);
        if (__all_sync(kEveryLane, counted && digit == same)) {
          if (lane_index() == 0) atomicAdd(&counts[digit], static_cast<uint32_t>(kWarp));
        } else if (counted) {
          atomicAdd(&counts[digit], 1u);
        }
      }
    }
    __syncwarp();
    for (int i = lane_index(); i < kDigits; i += kWarp) {
      const uint32_t count = atomicExch(&counts[i], 0u);
      if (count > 0) atomicAdd(&state->counts[i], count);
    }
  });
}

// Appends the bound's next digit. Runs on one warp: each lane handles consecutive digits, and the
// first lane handles the largest digits.
__global__ void __launch_bounds__(kThreads)
    find_digit_kernel(int width, Selection* state, int64_t units) {
  constexpr int kOwn = kDigits / kWarp;
  for_each_unit(units, [&](int64_t) {
    const uint32_t rank = state->rank, bits = state->bits;
    uint32_t* const own = state->counts + (kWarp - 1 - lane_index()) * kOwn;
    uint32_t sum = 0;
    for (int i = 0; i < kOwn; ++i) sum += own[i];
    uint32_t reached = sum;
    for (int lanes = 1; lanes < kWarp; lanes *= 2) {
      const uint32_t other = __shfl_up_sync(kEveryLane, reached, lanes);
      if (lane_index() >= lanes) reached += other;
    }
    __syncwarp();  // all have read the rank
    if (reached - sum < rank && rank <= reached) {
      uint32_t left = rank - (reached - sum);
      int i = kOwn - 1;
      for (; own[i] < left; --i) left -= own[i];
      state->bits = bits << width | static_cast<uint32_t>(own - state->counts + i);
      state->rank = left;
    }
    for (int i = 0; i < kOwn; ++i) own[i] = 0;
  });
}

// Which values are chosen: those that reach the bound, in two classes. All values of the first
// class are chosen, up to `count`, and as many of the second class as there is room for.
struct Choice {
  const float* x;
  int64_t n, chunk;     // values in total, values per chunk
  const int32_t* turn;  // values from there on are the first class; null: those above the bound
  int64_t count;

  // Calls f(place, value, lanes of the first class, lanes of the second class) for each row of a
  // chunk's values in which any value reaches the bound.
  template <typename F>
  __device__ void each(int64_t number, const Selection* state, F f) const {
    const int32_t least = turn ? 1 : 0;  // a sample's bound takes no zeros
    const int32_t bound = max(static_cast<int32_t>(state->bits), least);
    const uint32_t turned = static_cast<uint32_t>(turn_of(turn, n));
    const uint32_t end = static_cast<uint32_t>(min(n, (number + 1) * chunk));
    for (uint32_t first = static_cast<uint32_t>(number * chunk); first < end; first += kTile) {
      float values[kSlots];
#pragma unroll
      for (int k = 0; k < kSlots; ++k) {
        const uint32_t place = first + k * kWarp + lane_index();
        values[k] = place < end ? x[place] : 0.0f;
      }
#pragma unroll
      for (int k = 0; k < kSlots; ++k) {
        const uint32_t place = first + k * kWarp + lane_index();
        const int32_t bits = magnitude_bits(values[k]);
        const unsigned any = __ballot_sync(kEveryLane, place < end && bits >= bound);
        if (any == 0) continue;
        const bool later = turn ? place < turned : bits == bound;
        const unsigned second = __ballot_sync(kEveryLane, later) & any;
        f(place, values[k], any & ~second, second);
      }
    }
  }
};

__global__ void __launch_bounds__(kThreads)
    count_chosen_kernel(const Choice choice, Selection* state, int64_t units) {
  for_each_unit(units, [&](int64_t number) {
    uint32_t first = 0, second = 0;
    choice.each(number, state, [&](uint32_t, float, unsigned firsts, unsigned seconds) {
      first += __popc(firsts);
      second += __popc(seconds);
    });
    if (lane_index() == 0) state->found[number][0] = first;
    if (lane_index() == 0) state->found[number][1] = second;
  });
}

__global__ void __launch_bounds__(kThreads)
    write_chosen_kernel(const Choice choice, const Selection* state, int32_t* at, float* taken,
                        int64_t units) {
  for_each_unit(units, [&](int64_t number) {
    int before[2] = {}, quota[2] = {};  // per class: in earlier chunks, in total
    for (int64_t c = lane_index(); c < units; c += kWarp) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int found = static_cast<int>(state->found[c][k]);
        quota[k] += found;
        if (c < number) before[k] += found;
      }
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      before[k] = __reduce_add_sync(kEveryLane, before[k]);
      quota[k] = __reduce_add_sync(kEveryLane, quota[k]);
    }
    const int count = static_cast<int>(choice.count);
    quota[0] = min(quota[0], count);
    quota[1] = min(quota[1], count - quota[0]);
    const unsigned lower = (1u << lane_index()) - 1;
    choice.each(number, state, [&](uint32_t place, float value, unsigned firsts, unsigned seconds) {
      const int first = before[0] + __popc(firsts & lower);
      const int second = before[1] + __popc(seconds & lower);
      const bool takes = (firsts >> lane_index() & 1 && first < quota[0]) ||
                         (seconds >> lane_index() & 1 && second < quota[1]);
      if (takes) {
        const int to = min(first, quota[0]) + min(second, quota[1]);
        at[to] = static_cast<int32_t>(place);
        taken[to] = value;
      }
      before[0] += __popc(firsts);
      before[1] += __popc(seconds);
    });
    // The remaining entries are place n and value 0.
    int64_t to = quota[0] + quota[1] + number * kWarp + lane_index();
    for (; to < count; to += units * kWarp) {
      at[to] = static_cast<int32_t>(choice.n);
      taken[to] = 0.0f;
    }
  });
}

}  // namespace

cudaError_t launch_select(const SelectCall& call, cudaStream_t stream) {
  Selection* const state = reinterpret_cast<Selection*>(call.scratch);
  const bool sampled = call.turns != nullptr;
  const int64_t stride = sampled ? call.stride : 1;
  const Sample sample = {call.turns, stride, (call.n + stride - 1) / stride};
  const uint32_t rank = static_cast<uint32_t>(sampled ? call.rank : call.count);
  const int64_t tiles = (sample.count + kTile - 1) / kTile;
  cudaError_t error = launch(begin_kernel, 1, stream, rank, state);
  for (int shift = 31 - kDigitBits, width = kDigitBits; shift >= 0; shift -= 10, width = 10) {
    if (error == cudaSuccess) {
      error = launch(count_digits_kernel, std::min<int64_t>(tiles, kChunks), stream, call.x, call.n,
                     sample, shift, width, state);
    }
    if (error == cudaSuccess) error = launch(find_digit_kernel, 1, stream, width, state);
  }
  const int64_t chunk = ((call.n + kChunks - 1) / kChunks + kTile - 1) / kTile * kTile;
  const int64_t chunks = (call.n + chunk - 1) / chunk;
  const Choice choice = {call.x, call.n, chunk, sampled ? call.turns + 1 : nullptr, call.count};
  if (error == cudaSuccess) error = launch(count_chosen_kernel, chunks, stream, choice, state);
  if (error == cudaSuccess) {
    error = launch(write_chosen_kernel, chunks, stream, choice, state, call.at, call.taken);
  }
  return error;
}

}  // namespace cgx
