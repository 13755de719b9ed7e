// A call's leaves as raw pointers, for the kernels of both processors.
#ifndef CGX_FORMAT_LEAVES_H_
#define CGX_FORMAT_LEAVES_H_

#include <stdint.h>

#include "format/wire_format.h"

namespace cgx {

enum class DType : uint8_t { kF32, kBF16, kF16 };

CGX_HD constexpr int64_t item_size(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

// The leaves of one batch element, in slot order. Pointers may have any alignment of their dtype.
struct LeavesIn {
  const void* const* data;
  const DType* dtype;
};
struct LeavesOut {
  void* const* data;
  const DType* dtype;
};

// The factors of a leaf's values: value i is multiplied by
// rows[i / num_columns] * columns[i % num_columns]. Each array has two halves. The first half is
// used before encoding, the second half after decoding.
struct LeafUnits {
  const float* rows = nullptr;  // null: the leaf has none
  const float* columns = nullptr;
  int64_t num_rows = 0, num_columns = 0;
};

// Which half of a leaf's units a step uses.
enum Way { kIn, kOut };

}  // namespace cgx

#endif  // CGX_FORMAT_LEAVES_H_
