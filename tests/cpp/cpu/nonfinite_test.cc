// The search finds what a look at every value finds. Runs on several threads, in exact-size heap
// buffers.
#include "cpu/nonfinite.h"

#include <cmath>
#include <limits>

#include "cases.h"
#include "cpu/parallel.h"
#include "cpu/worker_pool.h"

namespace {

using cgx::DType;

bool is_finite(const void* data, DType dtype, int64_t i) {
  if (dtype == DType::kF32) return std::isfinite(static_cast<const float*>(data)[i]);
  const uint16_t exponent = dtype == DType::kBF16 ? 0x7f80 : 0x7c00;
  return (static_cast<const uint16_t*>(data)[i] & exponent) != exponent;
}

// How many values of each leaf are not finite, and the place of the first.
std::vector<int32_t> counted(const Buffers& leaves) {
  std::vector<int32_t> pairs;
  for (size_t k = 0; k < leaves.specs.size(); ++k) {
    int32_t count = 0, first = 0;
    for (int64_t i = 0; i < leaves.specs[k].size; ++i) {
      if (is_finite(leaves.data[k], leaves.dtypes[k], i)) continue;
      if (count++ == 0) first = static_cast<int32_t>(i);
    }
    pairs.push_back(count);
    pairs.push_back(first);
  }
  return pairs;
}

// Turns one value in `every` into a NaN or an infinity.
void spoil(Buffers& leaves, int64_t every) {
  for (size_t k = 0; k < leaves.specs.size(); ++k) {
    for (int64_t i = every / 2; i < leaves.specs[k].size; i += every) {
      const float f32 = i % 2 ? NAN : -std::numeric_limits<float>::infinity();
      const uint16_t half = leaves.dtypes[k] == DType::kBF16 ? 0xff80 : 0x7c01;
      if (leaves.dtypes[k] == DType::kF32) {
        std::memcpy(static_cast<char*>(leaves.data[k]) + 4 * i, &f32, 4);
      } else {
        std::memcpy(static_cast<char*>(leaves.data[k]) + 2 * i, &half, 2);
      }
    }
  }
}

void run(DType dtype, int64_t every, std::mt19937& rng) {
  std::vector<cgx::SlotSpec> specs;
  for (const int64_t size : {1, 5000, 0, 777}) specs.push_back({size, 8, 64, 0, 0});
  Buffers leaves(specs, dtype, rng);
  if (every) spoil(leaves, every);
  std::vector<cgx::SearchedLeaf> searched;
  int64_t values = 0;
  for (size_t k = 0; k < specs.size(); ++k) {
    searched.push_back({leaves.data[k], dtype, specs[k].size});
    values += specs[k].size;
  }
  cgx::WorkerPool pool(3);
  for (const int64_t pieces : {1, 7}) {
    std::vector<int32_t> pairs(2 * specs.size(), -1);
    cgx::NonFiniteTable table(pairs.data(), specs.size());
    cgx::split_range(pool, 1, 0, values, pieces,
                     [&](int64_t, int64_t first, int64_t last, int64_t) {
                       cgx::find_nonfinite(searched, first, last, table);
                     });
    check(pairs == counted(leaves), "dtype " + std::to_string(static_cast<int>(dtype)) +
                                        ", every " + std::to_string(every) + ", pieces " +
                                        std::to_string(pieces));
    check((pairs[2] > 0) == (every > 0), "something is found if it is there");
  }
}

void large_counts() {
  int32_t pair[2] = {-1, -1};
  cgx::NonFiniteTable table(pair, 1);
  check(pair[0] == 0 && pair[1] == 0, "a table starts with nothing");
  table.add(0, int64_t{1} << 40, int64_t{1} << 33);
  check(pair[0] == INT32_MAX && pair[1] == INT32_MAX, "numbers that do not fit are the largest");
  table.add(0, 5, 12);
  check(pair[0] == INT32_MAX && pair[1] == 12, "the first place wins");
}

}  // namespace

int main() {
  std::mt19937 rng(1);
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const int64_t every : {0, 1, 400}) run(dtype, every, rng);
  }
  large_counts();
  return report();
}
