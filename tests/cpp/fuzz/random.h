// Numbers that follow from a seed and a case's number, the same on every machine.
#ifndef CGX_TESTS_FUZZ_RANDOM_H_
#define CGX_TESTS_FUZZ_RANDOM_H_

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <random>

namespace fuzz {

class Random {
 public:
  Random(uint64_t seed, uint64_t number) {
    std::seed_seq all{seed, seed >> 32, number, number >> 32};
    engine_.seed(all);
  }
  // The lower bits of such an engine repeat too soon.
  uint32_t word() { return static_cast<uint32_t>(engine_() >> 32); }
  uint64_t bits() { return uint64_t{word()} << 32 | word(); }
  int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }
  int64_t within(int64_t least, int64_t most) { return least + below(most - least + 1); }
  // True one time in n.
  bool chance(int64_t n) { return below(n) == 0; }
  template <typename T>
  T of(std::initializer_list<T> all) {
    return all.begin()[below(static_cast<int64_t>(all.size()))];
  }
  // A number of values: usually small and near the edges of buckets and vectors, rarely up to
  // `most`.
  int64_t size(int64_t most) {
    if (chance(2048)) return below(most + 1);
    if (chance(2)) return below(70);
    return of<int64_t>(
               {0, 1, 31, 32, 33, 63, 64, 65, 127, 129, 255, 256, 257, 511, 512, 513, 600}) +
           (chance(16) ? 512 : 0);
  }
  // Any integer, preferably one near which arithmetic overflows.
  int64_t hostile() {
    const int64_t edge = of<int64_t>({0, 1, 2, 4, 8, 32, 33, 127, 128, 512, 4096, int64_t{1} << 20,
                                      int64_t{1} << 30, int64_t{1} << 31, int64_t{1} << 32,
                                      int64_t{1} << 48, int64_t{1} << 62, INT64_MAX});
    if (chance(8)) return static_cast<int64_t>(bits());
    const uint64_t near = static_cast<uint64_t>(edge) + static_cast<uint64_t>(within(-2, 2));
    return static_cast<int64_t>(chance(3) ? ~near : near);
  }
  void fill(void* to, int64_t bytes) {
    for (char* at = static_cast<char*>(to); bytes > 0; bytes -= 8, at += 8) {
      uint64_t own = engine_();
      own ^= own >> 32;
      std::memcpy(at, &own, bytes < 8 ? bytes : 8);
    }
  }

 private:
  std::linear_congruential_engine<uint64_t, 6364136223846793005u, 1442695040888963407u, 0> engine_;
};

}  // namespace fuzz

#endif  // CGX_TESTS_FUZZ_RANDOM_H_
