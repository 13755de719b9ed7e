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

// How many numbers `slots` has per leaf: bits, bucket_size, rounding, number, rotation, segment,
// and a UnitPlace. `Layout.attributes` in cgx_jax/kernels/wire.py writes them.
constexpr size_t kSlotNumbers = 9;

// Where a leaf's units lie in the array of all units, and how many values its rows have. A leaf
// without units has rows of 0 values.
struct UnitPlace {
  int64_t num_columns, rows, columns;
};

struct LayoutAttributes {
  Ints slots;
  int64_t world;
  int64_t rows = 1;              // how often the layout repeats the leaves
  int64_t longest_in_units = 0;  // bucket whose values the handler multiplies by units; 0: none

  size_t leaves() const { return slots.size() / kSlotNumbers; }
  SlotSpec spec(size_t leaf, int64_t size) const {
    const int64_t* const own = slots.begin() + leaf * kSlotNumbers;
    return {size, own[0], own[1], own[2], own[3], own[4], own[5]};
  }
  UnitPlace place(size_t leaf) const {
    const int64_t* const own = slots.begin() + leaf * kSlotNumbers + kSlotNumbers - 3;
    return {own[0], own[1], own[2]};
  }
  bool has_units(size_t leaf) const { return place(leaf).num_columns != 0; }
  // Whether any leaf has units: the call then has one more operand, the array of all units.
  bool have_units() const {
    bool any = false;
    for (size_t k = 0; k < leaves(); ++k) any |= has_units(k);
    return any;
  }
};

// Refuses units that the handler cannot apply: without them the values would be wrong.
inline ffi::Error check_units(const std::string& call, const LayoutAttributes& attributes) {
  const int64_t longest = attributes.longest_in_units;
  for (size_t k = 0; k < attributes.leaves(); ++k) {
    if (!attributes.has_units(k)) continue;
    if (longest == 0) {
      return invalid(call, "leaf " + std::to_string(k) + " has units, but this call takes none");
    }
    const int64_t bucket_size = attributes.spec(k, 0).bucket_size;
    if (bucket_size > longest) {
      return invalid(call, "bucket_size of leaf " + std::to_string(k) + " is " +
                               std::to_string(bucket_size) + ", must be at most " +
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
