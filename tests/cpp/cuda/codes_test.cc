// The CUDA kernels of codes, run on the CPU by tests/cpp/emulator, compared with the CPU kernels
// byte for byte. Arrays lie in heap blocks of exactly their size, at any multiple of their items'
// size.
#include "cuda/codes.h"

#include <algorithm>
#include <cmath>

#include "cases.h"
#include "cpu/kernels.h"
#include "cpu/select.h"
#include "warp.h"

namespace {

// `count` items, `shift` of them past malloc's alignment.
template <typename T>
struct Block {
  std::unique_ptr<T[]> all;
  int64_t shift, count;

  explicit Block(int64_t count, int64_t shift = 0)
      : all(new T[count + shift]), shift(shift), count(count) {
    std::memset(data(), 0xAA, count * sizeof(T));
  }
  T* data() const { return all.get() + shift; }
  bool operator==(const Block& other) const {
    return std::memcmp(data(), other.data(), count * sizeof(T)) == 0;
  }
};

const float kEdges[] = {0.0f, -0.0f, 1e-40f, -1e-40f, 3e38f, -3e38f, INFINITY,
                        NAN,  -NAN,  1e-38f, 1.0f,    -1.0f, 1e19f,  -INFINITY};
enum Kind { kNormal, kScaledRuns, kEqual, kSome, kWithEdges, kKinds };

// Values like those of gradients, of very different magnitudes, of equal magnitude, mostly zero,
// and with edge cases that include NaN and infinity.
Block<float> values_of(Kind kind, int64_t n, int64_t shift, std::mt19937& rng) {
  std::normal_distribution<float> normal;
  const float scales[] = {1e38f, 1e20f, 1e-30f, 1e-36f, 1e-40f};
  Block<float> x(n, shift);
  for (int64_t i = 0; i < n; ++i) {
    const float v = normal(rng);
    x.data()[i] = kind == kScaledRuns                 ? v * scales[i / 600 % 5]
                  : kind == kEqual                    ? (i % 3 == 0 ? -1.0f : 1.0f)
                  : kind == kSome                     ? (i % 200 == 0 ? v : 0.0f)
                  : kind == kWithEdges && i % 97 == 0 ? kEdges[i / 97 % 14]
                                                      : v;
  }
  return x;
}

void check_done(cudaError_t error, const std::string& name) {
  check(error == cudaSuccess, name + ": launch");
}

struct Levels {
  int64_t bucket, levels;
  bool l2;
  int width;
};
constexpr Levels kLevels[] = {{512, 7, true, 4},   {512, 1, false, 2},  {8, 1, true, 2},
                              {513, 3, true, 3},   {9, 15, true, 5},    {50, 31, false, 6},
                              {1000, 63, true, 7}, {4096, 127, true, 8}};

void levels(const Levels& how, const Block<float>& x, int64_t shift, const std::string& values) {
  const std::string name = values + ": bucket " + std::to_string(how.bucket) + " levels " +
                           std::to_string(how.levels) + " width " + std::to_string(how.width);
  const uint32_t key[2] = {0x12345678u, 0x9ABCDEF0u};
  const int64_t packed = (x.count * how.width + 7) / 8;
  const int64_t buckets = (x.count + how.bucket - 1) / how.bucket;
  const int64_t bytes = packed + 4 * buckets;
  Block<uint8_t> expected(bytes), got(bytes, shift);
  const auto call = [&](const Block<uint8_t>& payload) {
    uint8_t* const codes = payload.data();
    return cgx::BucketsCall{cgx::Coded::kSteps, x.data(),   x.count,    key,    codes,
                            codes + packed,     how.bucket, how.levels, how.l2, how.width};
  };
  cgx::current_kernels().codes.encode_buckets(call(expected), 0, x.count);
  check_done(cgx::launch_encode_steps(call(got), nullptr), name);
  check(got == expected, name);
}

constexpr std::pair<int64_t, int64_t> kKept[] = {{512, 5},   {1, 1},   {7, 7},     {100, 40},
                                                 {511, 511}, {513, 3}, {4096, 100}};

void largest_of_buckets(int64_t bucket, int64_t keep, const Block<float>& x, int64_t shift,
                        const std::string& values) {
  const std::string name =
      values + ": largest " + std::to_string(keep) + " of " + std::to_string(bucket);
  const int64_t buckets = (x.count + bucket - 1) / bucket;
  const Block<int32_t> at(buckets * keep), got_at(buckets * keep, shift);
  const Block<float> taken(buckets * keep), got_taken(buckets * keep, shift);
  cgx::current_kernels().codes.largest_of_buckets(x.data(), x.count, bucket, keep, 0, buckets,
                                                  at.data(), taken.data());
  check_done(cgx::launch_largest_of_buckets(x.data(), x.count, bucket, keep, got_at.data(),
                                            got_taken.data(), nullptr),
             name);
  check(got_at == at && got_taken == taken, name);
}

void select(const Block<float>& x, int64_t shift, const std::string& values) {
  const int64_t n = x.count;
  cgx::CallerAlone alone;
  Block<uint32_t> scratch(cgx::kScratchWords);
  for (const int64_t count : {int64_t{1}, (n + 99) / 100, (n + 2) / 3, n}) {
    const std::string name = values + ": " + std::to_string(count) + " of them";
    const Block<int32_t> at(count), got_at(count, shift);
    const Block<float> taken(count), got_taken(count, shift);
    cgx::SelectCall call = {x.data(),      n, count, nullptr, 1, 0, got_at.data(), got_taken.data(),
                            scratch.data()};
    cgx::largest(alone, x.data(), n, count, at.data(), taken.data());
    check_done(cgx::launch_select(call, nullptr), name);
    check(got_at == at && got_taken == taken, name + ", the largest");
    for (const int64_t stride : {int64_t{1}, std::min(n, int64_t{7})}) {
      const int32_t turns[2] = {static_cast<int32_t>(n - 1), static_cast<int32_t>(n / 3)};
      call.turns = turns;
      call.stride = stride;
      call.rank = std::max<int64_t>(1, count / stride);
      cgx::above_sampled(x.data(), n, count, turns, stride, call.rank, at.data(), taken.data());
      check_done(cgx::launch_select(call, nullptr), name);
      check(got_at == at && got_taken == taken, name + ", above a bound");
    }
  }
}

}  // namespace

int main() {
  std::mt19937 rng(5);
  emulator::set_seed(1);
  for (const int64_t n : {0, 1, 7, 31, 65, 513, 1023, 2560, 5000, 13001}) {
    for (int kind = 0; kind < kKinds; ++kind) {
      if (kHalfOfTheCases && (n + kind) % 2 != 0) continue;
      const int64_t shift = (n + kind) % 5;
      const std::string name = std::to_string(n) + " values of kind " + std::to_string(kind);
      const Block<float> x = values_of(static_cast<Kind>(kind), n, shift, rng);
      if (n > 0) select(x, shift, name);
      for (const Levels& how : kLevels) levels(how, x, shift, name);
      for (const auto& [bucket, keep] : kKept) {
        if (n > 100 * bucket) continue;  // the emulator takes long for many buckets
        largest_of_buckets(bucket, keep, x, shift, name);
      }
    }
  }
  return report();
}
