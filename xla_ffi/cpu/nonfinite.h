// Finds values that are not finite.
#ifndef CGX_CPU_NONFINITE_H_
#define CGX_CPU_NONFINITE_H_

#include <stdint.h>

#include <mutex>
#include <vector>

#include "format/leaves.h"

namespace cgx {

struct SearchedLeaf {
  const void* data;
  DType dtype;
  int64_t size;
};

// What is found in each leaf, as a pair i32[2]: how many values are not finite, and the place of
// the first. The pair is (0, 0) if all values are finite. A number that does not fit becomes the
// largest i32. Several threads may add at once.
class NonFiniteTable {
 public:
  // The pair of leaf k is at `pairs + 2 * k`. Zeroes all pairs.
  NonFiniteTable(int32_t* pairs, size_t leaves);
  void add(size_t leaf, int64_t count, int64_t first);

 private:
  int32_t* const pairs_;
  std::mutex mutex_;
};

// Adds what is not finite among the values [from, to) of the leaves, counted one leaf after the
// other.
void find_nonfinite(const std::vector<SearchedLeaf>& leaves, int64_t from, int64_t to,
                    NonFiniteTable& table);

}  // namespace cgx

#endif  // CGX_CPU_NONFINITE_H_
