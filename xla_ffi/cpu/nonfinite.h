// Values of a fusion buffer that are not finite, found through the ranges of its buckets.
#ifndef CGX_CPU_NONFINITE_H_
#define CGX_CPU_NONFINITE_H_

#include <stdint.h>

#include <mutex>

#include "format/leaves.h"
#include "format/wire_format.h"

namespace cgx {

// What is found in each leaf: how many values are not finite, and the place of the first, as a pair
// i32[2]; (0, 0) where all are finite, and the largest number where one does not fit. Several
// threads may add at once.
class NonFiniteTable {
 public:
  // The pair of leaf k is at `pairs + k * stride`. Zeroes all pairs.
  NonFiniteTable(int32_t* pairs, int64_t leaves, int64_t stride);
  void add(int64_t leaf, int64_t count, int64_t first);

 private:
  int32_t* const pairs_;
  const int64_t stride_;
  std::mutex mutex_;
};

// Where to search, and the payload that was made of it or that it was made of.
struct FindCall {
  Layout layout;
  LeavesIn leaves;
  const uint8_t* payload;  // u8[peers, world, chunk_bytes]
  int64_t peers;           // 0: nothing is known of the values, so all are looked at
  int64_t own;             // the chunk whose records lie elsewhere; -1: none
  const uint8_t* own_row;  // u8[chunk_bytes]: there
  const uint8_t*
      unbounded;  // null, or whether a leaf's values may exceed the ranges of its buckets
};

// Adds to `table` what the leaves hold in the records that start in [from, to) of the buffer.
//
// A bucket's values are looked at only where the ranges in its records do not rule out that one of
// them is not finite. Values out of a code are bounded by the sum of all peers' ranges, or that
// sum over a divisor of at least 1.
void find_nonfinite(const FindCall& call, int64_t from, int64_t to, NonFiniteTable& table);

}  // namespace cgx

#endif  // CGX_CPU_NONFINITE_H_
