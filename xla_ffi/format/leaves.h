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

// Whether a step takes values into their units, before it encodes them, or out of them.
enum Way { kIn, kOut };

// The factors of a leaf's values: on the way in, value i is multiplied by
// rows[i / num_columns] * columns[i % num_columns]. The factors on the way out lie `to_out` factors
// after those on the way in.
struct LeafUnits {
  const float* rows = nullptr;  // null: the leaf has none
  const float* columns = nullptr;
  int64_t num_columns = 0, to_out = 0;
};

}  // namespace cgx

#endif  // CGX_FORMAT_LEAVES_H_
