// Builds a Layout from specifications that nobody has checked yet.
#ifndef CGX_FORMAT_LAYOUT_H_
#define CGX_FORMAT_LAYOUT_H_

#include <stdint.h>

#include <string>
#include <vector>

#include "format/wire_format.h"

namespace cgx {

constexpr int64_t kMaxBucket = int64_t{1} << 30;
constexpr int64_t kMaxWorld = int64_t{1} << 20;
constexpr int64_t kMaxSize = int64_t{1} << 48;  // values of all leaves, so that byte counts fit
constexpr int64_t kMaxRow = int64_t{1} << 33;   // bytes; kernels number its words with 32 bits

// A leaf's slot before it is checked, so its numbers may be anything.
struct SlotSpec {
  int64_t size;
  int64_t bits;
  int64_t bucket_size;
  int64_t rounding;      // a Rounding
  int64_t number;        // the leaf's number, which seeds its noise and its rotation
  int64_t rotation = 0;  // 0 or 1
  int64_t segment = 0;   // values for a bit of a record's mask; 0: a 16th of a bucket
};

// The arrays behind a Layout.
class OwnedLayout {
 public:
  // Returns an error message that names the wrong value and its limit; empty if all is well.
  std::string build(const std::vector<SlotSpec>& specs, int64_t world);

  Layout view() const;
  // The scratch of a kernel: twice the values of the longest bucket, padded to whole columns.
  int64_t scratch_values() const { return scratch_values_; }

 private:
  std::vector<Slot> slots_;
  std::vector<int64_t> begin_{0, 0};
  int64_t chunk_bytes_ = 0;
  int64_t values_ = 0;
  int64_t scratch_values_ = 0;
};

}  // namespace cgx

#endif  // CGX_FORMAT_LAYOUT_H_
