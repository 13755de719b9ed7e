// Selects the values of largest magnitude, or those above a sampled threshold. Writes their places
// and values, in the order of the places. Large arrays cost only one pass over their memory.
#ifndef CGX_CPU_SELECT_H_
#define CGX_CPU_SELECT_H_

#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "format/levels.h"

namespace cgx {

// A pool without threads.
struct CallerAlone {
  int64_t num_threads() const { return 1; }
  template <typename Task>
  void Schedule(Task&&) {}
};

// Consecutive values of an array, or a selection of them with their places in `at`.
struct Piece {
  const float* values;
  int64_t count;
  int64_t first;      // place of the first
  const int32_t* at;  // null: the values are consecutive

  int32_t place(int64_t i) const { return at ? at[i] : static_cast<int32_t>(first + i); }
};

// The bits of the k-th largest magnitude, and how many values that equal it are among the k.
struct Boundary {
  uint32_t bits;
  int64_t ties;
};

// Finds the highest bits first. Each pass counts the values that share the bits found so far.
template <typename Pool>
Boundary find_boundary(Pool& pool, const std::vector<Piece>& pieces, int64_t k) {
  constexpr int kWidth = 11, kCounts = 1 << kWidth;
  const int64_t number = static_cast<int64_t>(pieces.size());
  uint32_t found = 0;
  for (int shift = 31 - kWidth, width = kWidth; shift >= 0; shift -= 10, width = 10) {
    std::vector<int64_t> counts(workers(pool, number) * kCounts);
    parallel_for(pool, number, [&](int64_t p, int64_t worker) {
      int64_t* const own = counts.data() + worker * kCounts;
      for (int64_t i = 0; i < pieces[p].count; ++i) {
        const uint32_t bits = magnitude_bits(pieces[p].values[i]) >> shift;
        own[bits & ((1u << width) - 1)] += bits >> width == found;  // no branch to mispredict
      }
    });
    uint32_t digit = (1u << width) - 1;
    for (;; --digit) {
      int64_t here = 0;
      for (size_t at = digit; at < counts.size(); at += kCounts) here += counts[at];
      if (here >= k) break;
      k -= here;
    }
    found = found << width | digit;
  }
  return {found, k};
}

// The bits of a magnitude that, according to a sample, somewhat more than k of n values reach.
inline uint32_t sampled_bound(const float* x, int64_t n, int64_t k) {
  constexpr int64_t kRuns = 1 << 14, kRun = 4;
  std::vector<float> sample(kRuns * kRun);
  for (int64_t i = 0; i < kRuns; ++i)
    memcpy(sample.data() + i * kRun, x + i * (n / kRuns), kRun * sizeof(float));
  const double mean = static_cast<double>(k) / n * (kRuns * kRun);
  // Six standard deviations of a count of values. Neighbors may be alike: at worst, each value
  // counts four times.
  const double rank = std::ceil(mean + 6 * std::sqrt(mean) + 8);
  if (rank >= kRuns * kRun) return 0;
  CallerAlone alone;
  return find_boundary(alone, {{sample.data(), kRuns * kRun, 0, nullptr}},
                       static_cast<int64_t>(rank))
      .bits;
}

// The values that reach a bound, found in one pass, as pieces that own their arrays.
class Candidates {
 public:
  // Finds the values of x[n] whose magnitudes have at least these bits. There is room for `share`
  // of the values.
  template <typename Pool>
  Candidates(Pool& pool, const float* x, int64_t n, uint32_t bits, double share) {
    const int64_t count = std::min(pieces(n), 4 * static_cast<int64_t>(pool.num_threads()));
    const int64_t room = static_cast<int64_t>(share * n / count) + kSlack;
    at_.reset(new int32_t[count * (room + kSlack)]);
    taken_.reset(new float[count * (room + kSlack)]);
    pieces_.resize(count);
    const CodeKernels& codes = current_kernels().codes;
    parallel_for(pool, count, [&](int64_t p, int64_t) {
      int32_t* const at = at_.get() + p * (room + kSlack);
      float* const taken = taken_.get() + p * (room + kSlack);
      const int64_t found = codes.collect(x, chunk_cut(p, n, count), chunk_cut(p + 1, n, count),
                                          bits, room, at, taken);
      pieces_[p] = {taken, found, 0, at};
    });
    for (const Piece& piece : pieces_) {
      total_ += piece.count;
      complete_ &= piece.count <= room;
    }
  }
  bool hold(int64_t k) const { return complete_ && total_ >= k; }
  const std::vector<Piece>& all() const { return pieces_; }

 private:
  std::unique_ptr<int32_t[]> at_;
  std::unique_ptr<float[]> taken_;
  std::vector<Piece> pieces_;
  int64_t total_ = 0;
  bool complete_ = true;
};

// Writes the k largest magnitudes of some pieces. Of equal ones it takes the first.
template <typename Pool>
void write_largest(Pool& pool, const std::vector<Piece>& pieces, int64_t k, int32_t* at,
                   float* taken) {
  const int64_t number = static_cast<int64_t>(pieces.size());
  const Boundary boundary = find_boundary(pool, pieces, k);
  std::vector<int64_t> above(number), equal(number), ties(number), start(number);
  parallel_for(pool, number, [&](int64_t p, int64_t) {
    int64_t more = 0, same = 0;
    for (int64_t i = 0; i < pieces[p].count; ++i) {
      const uint32_t bits = magnitude_bits(pieces[p].values[i]);
      more += bits > boundary.bits;
      same += bits == boundary.bits;
    }
    above[p] = more, equal[p] = same;
  });
  int64_t next = 0, left = boundary.ties;
  for (int64_t p = 0; p < number; ++p) {
    ties[p] = std::min(left, equal[p]);
    left -= ties[p];
    start[p] = next;
    next += above[p] + ties[p];
  }
  parallel_for(pool, number, [&](int64_t p, int64_t) {
    int64_t to = start[p], rest = ties[p];
    for (int64_t i = 0; i < pieces[p].count; ++i) {
      const uint32_t bits = magnitude_bits(pieces[p].values[i]);
      if (bits < boundary.bits || (bits == boundary.bits && rest-- <= 0)) continue;
      at[to] = pieces[p].place(i);
      taken[to++] = pieces[p].values[i];
    }
  });
}

// Writes the places and values of the k largest magnitudes of x[n], 1 <= k <= n < 2^31.
template <typename Pool>
void largest(Pool& pool, const float* x, int64_t n, int64_t k, int32_t* at, float* taken) {
  constexpr int64_t kSampled = 1 << 18;  // from so many values on, a sample pays off
  const double share = 2.0 * k / n + 1e-3;
  if (n >= kSampled && share < 0.5) {
    const uint32_t bound = sampled_bound(x, n, k);
    const Candidates candidates(pool, x, n, bound, share);
    if (candidates.hold(k)) return write_largest(pool, candidates.all(), k, at, taken);
  }
  const int64_t count = pieces(n);
  std::vector<Piece> all;
  for (int64_t p = 0; p < count; ++p) {
    const int64_t from = chunk_cut(p, n, count);
    all.push_back({x + from, chunk_cut(p + 1, n, count) - from, from, nullptr});
  }
  write_largest(pool, all, k, at, taken);
}

// Selects the first k values of x[n] whose magnitudes are at least the `rank`-th largest of a
// sample. The search starts at `places[1]` and wraps around at n. The sample is every `stride`-th
// value from `places[0]` on, and wraps around too. If fewer than k values are found, the remaining
// entries are place n and value 0. Runs on one thread, because it stops when it has k values.
inline void above_sampled(const float* x, int64_t n, int64_t k, const int32_t* places,
                          int64_t stride, int64_t rank, int32_t* at, float* taken) {
  constexpr int64_t kAhead = 32;  // values of the sample
  std::vector<float> sample((n + stride - 1) / stride);
  int64_t place = places[0];
  for (float& seen : sample) {
    const int64_t ahead = place + kAhead * stride;
    __builtin_prefetch(x + (ahead < n ? ahead : 0), 0, 3);
    seen = x[place];
    place += stride;
    if (place >= n) place -= n;
  }
  const int64_t size = static_cast<int64_t>(sample.size());
  CallerAlone alone;
  const std::vector<Piece> whole = {{sample.data(), size, 0, nullptr}};
  const uint32_t bits = std::max(find_boundary(alone, whole, rank).bits, 1u);  // no zeros
  const CodeKernels& codes = current_kernels().codes;
  std::vector<int32_t> found_at(k + kSlack);
  std::vector<float> found(k + kSlack);
  const auto collect = [&](int64_t from, int64_t to, int64_t room, int64_t start) {
    const int64_t count = codes.collect(x, from, to, bits, room, found_at.data(), found.data());
    const int64_t written = std::min(count, room);
    std::copy_n(found_at.begin(), written, at + start);
    std::copy_n(found.begin(), written, taken + start);
    return written;
  };
  const int64_t turned = places[1];
  const int64_t late = collect(turned, n, k, 0), early = collect(0, turned, k - late, late);
  std::rotate(at, at + late, at + late + early);
  std::rotate(taken, taken + late, taken + late + early);
  std::fill(at + late + early, at + k, static_cast<int32_t>(n));
  std::fill(taken + late + early, taken + k, 0.0f);
}

}  // namespace cgx

#endif  // CGX_CPU_SELECT_H_
