#include "cpu/nonfinite.h"

#include <string.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "format/runs.h"

namespace cgx {
namespace {

int32_t saturated(int64_t n) {
  return static_cast<int32_t>(std::min<int64_t>(n, std::numeric_limits<int32_t>::max()));
}

// Half of the largest number of a type. No rounding turns a smaller value into an infinity.
double limit(DType dtype) {
  return dtype == DType::kF16 ? 32752.0 : std::numeric_limits<float>::max() / 2.0;
}

// The largest magnitude that a record decodes to; NaN or infinity if it is poisoned.
double reach(const uint8_t* record, int bits) {
  Meta meta;
  memcpy(&meta, record, sizeof(meta));
  return std::fabs(double{meta.lo}) + std::fabs(double{meta.unit}) * ((1 << bits) - 1);
}

constexpr int64_t kBlock = 1024;

template <typename Bits>
void count(const Bits* x, int64_t n, Bits exponent, int64_t* found, int64_t* first) {
  for (int64_t i = 0; i < n; i += kBlock) {
    const int64_t end = std::min(n, i + kBlock);
    Bits any = 0;  // a loop without branches, which compilers vectorize
    for (int64_t k = i; k < end; ++k) any |= (x[k] & exponent) == exponent;
    for (int64_t k = i; any && k < end; ++k) {
      if ((x[k] & exponent) == exponent && (*found)++ == 0) *first = k;
    }
  }
}

// Checks the n values of a leaf from `begin` on.
void count(const LeavesIn& leaves, int64_t leaf, int64_t begin, int64_t n, NonFiniteTable& table) {
  int64_t found = 0, first = 0;
  const DType dtype = leaves.dtype[leaf];
  if (dtype == DType::kF32) {
    const auto* x = static_cast<const uint32_t*>(leaves.data[leaf]) + begin;
    count<uint32_t>(x, n, 0x7f800000u, &found, &first);
  } else {
    const auto* x = static_cast<const uint16_t*>(leaves.data[leaf]) + begin;
    count<uint16_t>(x, n, dtype == DType::kBF16 ? 0x7f80 : 0x7c00, &found, &first);
  }
  if (found > 0) table.add(leaf, found, begin + first);
}

}  // namespace

NonFiniteTable::NonFiniteTable(int32_t* pairs, int64_t leaves, int64_t stride)
    : pairs_(pairs), stride_(stride) {
  for (int64_t k = 0; k < leaves; ++k) pairs[k * stride] = pairs[k * stride + 1] = 0;
}

void NonFiniteTable::add(int64_t leaf, int64_t count, int64_t first) {
  const std::lock_guard<std::mutex> lock(mutex_);
  int32_t* const pair = pairs_ + leaf * stride_;
  const int32_t place = saturated(first);
  if (pair[0] == 0 || place < pair[1]) pair[1] = place;
  pair[0] = saturated(pair[0] + count);
}

void find_nonfinite(const FindCall& call, int64_t from, int64_t to, NonFiniteTable& table) {
  const Layout& layout = call.layout;
  const int64_t peer_bytes = layout.world * layout.chunk_bytes;
  for_each_run(layout, from, to, [&](const Run& run) {
    if (call.peers == 0 || (call.unbounded != nullptr && call.unbounded[run.leaf])) {
      return count(call.leaves, run.leaf, run.first_value(), run.values(), table);
    }
    const bool own = run.chunk == call.own;
    const int64_t peers = own ? 1 : call.peers;
    const uint8_t* record = own ? call.own_row + (run.offset - run.chunk * layout.chunk_bytes)
                                : call.payload + run.offset;
    const double most = limit(call.leaves.dtype[run.leaf]);
    for (int64_t k = run.first; k < run.last; ++k) {
      const Record format = run.slot.record(k);
      double total = 0;
      for (int64_t p = 0; p < peers; ++p) total += reach(record + p * peer_bytes, format.bits);
      // Rotating a bucket back may concentrate the values of all its codes in one value.
      if (run.slot.rotated) total *= std::sqrt(static_cast<double>(kRows * format.columns()));
      if (!(total <= most)) {
        count(call.leaves, run.leaf, k * run.slot.bucket_size, format.values, table);
      }
      record += format.bytes();
    }
  });
}

}  // namespace cgx
