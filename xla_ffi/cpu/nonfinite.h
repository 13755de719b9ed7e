// Finds values of a fusion buffer that are not finite, with the help of its buckets' ranges.
#ifndef CGX_CPU_NONFINITE_H_
#define CGX_CPU_NONFINITE_H_

#include <stdint.h>

#include <mutex>

#include "format/leaves.h"
#include "format/wire_format.h"

namespace cgx {

// What is found in each leaf, as a pair i32[2]: how many values are not finite, and the place of
// the first. The pair is (0, 0) if all values are finite. A number that does not fit becomes the
// largest i32. Several threads may add at once.
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

// The leaves to search, and the payload that they were encoded to or decoded from.
struct FindCall {
  Layout layout;
  LeavesIn leaves;
  const uint8_t* payload;  // u8[peers, world, chunk_bytes]
  int64_t peers;           // 0: nothing is known about the values, so all are checked
  int64_t own;             // the chunk whose records lie in own_row; -1: none
  const uint8_t* own_row;  // u8[chunk_bytes]
  const uint8_t*
      unbounded;  // null, or per leaf whether values may exceed the ranges of their buckets
};

// Adds to `table` the values that are not finite in the records that start in [from, to) of the
// buffer.
//
// A bucket's values are checked only if the ranges in its records do not prove that all values are
// finite. Decoded values are bounded by the sum of all peers' ranges, or by that sum over a divisor
// of at least 1.
void find_nonfinite(const FindCall& call, int64_t from, int64_t to, NonFiniteTable& table);

}  // namespace cgx

#endif  // CGX_CPU_NONFINITE_H_
