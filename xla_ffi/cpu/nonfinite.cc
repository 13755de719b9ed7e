#include "cpu/nonfinite.h"

#include <algorithm>
#include <limits>

namespace cgx {
namespace {

int32_t saturated(int64_t n) {
  return static_cast<int32_t>(std::min<int64_t>(n, std::numeric_limits<int32_t>::max()));
}

constexpr int64_t kBlock = 1024;

// Counts the values [from, to) whose exponent has all bits set.
template <typename Bits>
void count(const void* data, int64_t from, int64_t to, Bits exponent, int64_t* found,
           int64_t* first) {
  const auto* const x = static_cast<const Bits*>(data);
  for (int64_t i = from; i < to; i += kBlock) {
    const int64_t end = std::min(to, i + kBlock);
    Bits any = 0;  // a loop without branches, which compilers vectorize
    for (int64_t k = i; k < end; ++k) any |= (x[k] & exponent) == exponent;
    for (int64_t k = i; any && k < end; ++k) {
      if ((x[k] & exponent) == exponent && (*found)++ == 0) *first = k;
    }
  }
}

}  // namespace

NonFiniteTable::NonFiniteTable(int32_t* pairs, size_t leaves) : pairs_(pairs) {
  std::fill_n(pairs, 2 * leaves, 0);
}

void NonFiniteTable::add(size_t leaf, int64_t count, int64_t first) {
  const std::lock_guard<std::mutex> lock(mutex_);
  int32_t* const pair = pairs_ + 2 * leaf;
  const int32_t place = saturated(first);
  if (pair[0] == 0 || place < pair[1]) pair[1] = place;
  pair[0] = saturated(pair[0] + count);
}

void find_nonfinite(const std::vector<SearchedLeaf>& leaves, int64_t from, int64_t to,
                    NonFiniteTable& table) {
  for (size_t k = 0; k < leaves.size() && to > 0; ++k) {
    const auto& [data, dtype, size] = leaves[k];
    const int64_t begin = std::max<int64_t>(from, 0), end = std::min(to, size);
    int64_t found = 0, first = 0;
    if (dtype == DType::kF32) {
      count<uint32_t>(data, begin, end, 0x7f800000u, &found, &first);
    } else {
      count<uint16_t>(data, begin, end, dtype == DType::kBF16 ? 0x7f80 : 0x7c00, &found, &first);
    }
    if (found > 0) table.add(k, found, first);
    from -= size, to -= size;
  }
}

}  // namespace cgx
