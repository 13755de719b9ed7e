// The attributes that say how a call encodes its leaves. Only this file interprets them.
#ifndef CGX_HANDLERS_SLOTS_H_
#define CGX_HANDLERS_SLOTS_H_

#include <stdint.h>

#include <string>
#include <utility>
#include <vector>

#include "format/layout.h"
#include "handlers/checks.h"

namespace cgx {

// How many numbers `slots` has per leaf: bits, bucket_size, rounding, number, rotation, units,
// segment.
// `Layout.attributes` in cgx_jax/kernels/wire.py writes them.
constexpr size_t kSlotNumbers = 7;

struct LayoutAttributes {
  Ints slots;
  int64_t world;
  int64_t rows = 1;              // how often the layout repeats the leaves
  int64_t longest_in_units = 0;  // bucket whose values the handler multiplies by units; 0: none

  size_t leaves() const { return slots.size() / kSlotNumbers; }
  SlotSpec spec(size_t leaf, int64_t size) const {
    const int64_t* const own = slots.begin() + leaf * kSlotNumbers;
    return {size, own[0], own[1], own[2], own[3], own[4], own[5], own[6]};
  }
  bool has_units(size_t leaf) const { return spec(leaf, 0).units == 1; }
  // The number of leaves that have units.
  size_t num_units() const {
    size_t count = 0;
    for (size_t k = 0; k < leaves(); ++k) count += has_units(k);
    return count;
  }
};

// Refuses units that the handler cannot apply: without them the values would be wrong.
inline ffi::Error check_units(const std::string& call, const LayoutAttributes& attributes) {
  const int64_t longest = attributes.longest_in_units;
  for (size_t k = 0; k < attributes.leaves(); ++k) {
    const SlotSpec spec = attributes.spec(k, 0);
    if (spec.units != 0 && longest == 0) {
      return invalid(call, "units of leaf " + std::to_string(k) + " is " +
                               std::to_string(spec.units) +
                               ", must be 0: this call takes no units");
    }
    if (spec.units != 0 && spec.bucket_size > longest) {
      return invalid(call, "bucket_size of leaf " + std::to_string(k) + " is " +
                               std::to_string(spec.bucket_size) + ", must be at most " +
                               std::to_string(longest) + " with units");
    }
  }
  return ffi::Error::Success();
}

// Builds the layout of leaves with these sizes.
inline ffi::Error build_layout(const std::string& call, const std::vector<int64_t>& sizes,
                               const LayoutAttributes& attributes, OwnedLayout* layout) {
  if (attributes.slots.size() != kSlotNumbers * sizes.size()) {
    return invalid(call, "length of slots is " + std::to_string(attributes.slots.size()) +
                             ", expected " + std::to_string(kSlotNumbers) + " for each of " +
                             std::to_string(sizes.size()) + " leaves");
  }
  CGX_TRY(check_units(call, attributes));
  std::vector<SlotSpec> specs;
  for (int64_t row = 0; row < attributes.rows; ++row) {
    for (size_t k = 0; k < sizes.size(); ++k) specs.push_back(attributes.spec(k, sizes[k]));
  }
  const std::string error = layout->build(specs, attributes.world);
  return error.empty() ? ffi::Error::Success() : invalid(call, error);
}

template <typename Binding>
auto with_layout(Binding&& binding) {
  return std::forward<Binding>(binding).template Attr<Ints>("slots").template Attr<int64_t>(
      "world");
}

}  // namespace cgx

#endif  // CGX_HANDLERS_SLOTS_H_
