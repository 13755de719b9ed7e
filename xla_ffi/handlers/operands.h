// The operands of calls on fusion buffers: leaves and their units.
//
// A call carries a batch of independent fusion buffers, so that vmap needs no loop. The batch is
// the leading dimension of every operand. Apart from it, only element counts matter, so a leaf can
// be passed in any shape.
#ifndef CGX_HANDLERS_OPERANDS_H_
#define CGX_HANDLERS_OPERANDS_H_

#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "cpu/pages.h"
#include "format/layout.h"
#include "format/leaves.h"
#include "handlers/checks.h"
#include "schedule/schedule.h"
#include "xla/ffi/api/ffi.h"

namespace cgx {

using Keys = ffi::Buffer<ffi::U32>;
using Ranks = ffi::Buffer<ffi::S32>;   // one per batch element, so its size is the batch
using Payload = ffi::Buffer<ffi::U8>;  // [batch,] rows, bytes

// --- the attributes that say how a call encodes its leaves

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
      return must_be(call, "bucket_size of leaf " + std::to_string(k), bucket_size,
                     "at most " + std::to_string(longest) + " with units");
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

// --- the operands

// Leaves of all batch elements.
struct Leaves {
  std::vector<char*> data;
  std::vector<DType> dtype;
  std::vector<int64_t> size;  // values per batch element

  int64_t bytes(size_t k) const { return size[k] * item_size(dtype[k]); }

  ffi::Error add_one(const std::string& call, const ffi::AnyBuffer& buffer, int64_t batch) {
    const std::string name = "leaf " + std::to_string(size.size());
    const int64_t count = static_cast<int64_t>(buffer.element_count());
    if (count % batch != 0) {
      return invalid(call, name + " has " + std::to_string(count) +
                               " values, must be a multiple of the batch of " +
                               std::to_string(batch));
    }
    const ffi::DataType type = buffer.element_type();
    if (type != ffi::F32 && type != ffi::BF16 && type != ffi::F16) {
      return invalid(call, "dtype of " + name + " is XLA type " +
                               std::to_string(static_cast<int>(type)) +
                               ", must be f32, bf16 or f16");
    }
    dtype.push_back(type == ffi::F32    ? DType::kF32
                    : type == ffi::BF16 ? DType::kBF16
                                        : DType::kF16);
    size.push_back(count / batch);
    data.push_back(static_cast<char*>(buffer.untyped_data()));
    return ffi::Error::Success();
  }

  // Adds all operands or results except the last `others`.
  template <typename Buffers>
  ffi::Error add(const std::string& call, const Buffers& buffers, int64_t batch,
                 size_t others = 0) {
    for (size_t k = 0; k + others < buffers.size(); ++k) {
      auto buffer = buffers.template get<ffi::AnyBuffer>(k);
      if (buffer.has_error()) return buffer.error();
      if constexpr (std::is_same_v<Buffers, ffi::RemainingRets>) {
        CGX_TRY(add_one(call, **buffer, batch));
      } else {
        CGX_TRY(add_one(call, *buffer, batch));
      }
    }
    return ffi::Error::Success();
  }

  // Moves all but the first `count` leaves to `rest`.
  ffi::Error split(const std::string& call, size_t count, Leaves* rest) {
    if (size.size() < count) {
      return must_be(call, "number of leaves", size.size(), "at least " + std::to_string(count));
    }
    rest->data.assign(data.begin() + count, data.end());
    rest->dtype.assign(dtype.begin() + count, dtype.end());
    rest->size.assign(size.begin() + count, size.end());
    data.resize(count), dtype.resize(count), size.resize(count);
    return ffi::Error::Success();
  }

  // The pointers of every batch element; the leaf index varies fastest.
  std::vector<void*> pointers(int64_t batch) const {
    std::vector<void*> all;
    all.reserve(batch * data.size());
    for (int64_t b = 0; b < batch; ++b) {
      for (size_t k = 0; k < data.size(); ++k) all.push_back(data[k] + b * bytes(k));
    }
    return all;
  }
};

// For the results of a CPU call, whose memory XLA may just have obtained from the system.
inline void prefer_huge_pages(const Leaves& results, int64_t batch = 1) {
  for (size_t k = 0; k < results.data.size(); ++k) {
    prefer_huge_pages(results.data[k], batch * results.bytes(k));
  }
}

inline ffi::Error same_leaves(const std::string& call, const Leaves& in, const Leaves& out) {
  if (in.data.size() != out.data.size()) {
    return invalid(call, expected("number of result leaves", out.data.size(), in.data.size()));
  }
  for (size_t k = 0; k < in.data.size(); ++k) {
    if (in.size[k] != out.size[k] || in.dtype[k] != out.dtype[k]) {
      return invalid(call, "result leaf " + std::to_string(k) + " has " +
                               std::to_string(out.size[k]) + " values of dtype " +
                               std::to_string(static_cast<int>(out.dtype[k])) + ", expected " +
                               std::to_string(in.size[k]) + " of dtype " +
                               std::to_string(static_cast<int>(in.dtype[k])));
    }
  }
  return ffi::Error::Success();
}

// The units of all batch elements: one entry per leaf, with null arrays for a leaf without units.
struct Units {
  std::vector<LeafUnits> first;    // of batch element 0; empty when no leaf has units
  const float* numbers = nullptr;  // the array of all units, [batch,] 2 ways, `count`
  int64_t count = 0;

  ffi::Error add(const std::string& call, const Leaves& leaves, const Leaves& operand,
                 const LayoutAttributes& attributes) {
    if (operand.size.empty()) return ffi::Error::Success();
    if (operand.dtype[0] != DType::kF32) return invalid(call, "dtype of the units is not f32");
    if (operand.size[0] % 2 != 0) {
      return must_be(call, "size of the units", operand.size[0],
                     "a multiple of 2: one half for each way");
    }
    numbers = reinterpret_cast<const float*>(operand.data[0]);
    count = operand.size[0] / 2;
    for (size_t k = 0; k < leaves.size.size(); ++k) {
      LeafUnits& own = first.emplace_back();
      if (!attributes.has_units(k)) continue;
      const auto [num_columns, rows, columns] = attributes.place(k);
      const int64_t size = leaves.size[k], num_rows = num_columns > 0 ? size / num_columns : 0;
      const auto lie_within = [&](int64_t begin, int64_t length) {
        return begin >= 0 && length <= count && begin <= count - length;
      };
      if (num_columns <= 0 || num_rows * num_columns != size || !lie_within(rows, num_rows) ||
          !lie_within(columns, num_columns)) {
        return invalid(call, "units of leaf " + std::to_string(k) + " are rows of " +
                                 std::to_string(num_columns) + " values, from " +
                                 std::to_string(rows) + " and " + std::to_string(columns) + " of " +
                                 std::to_string(count) + " on, which do not fit its " +
                                 std::to_string(size) + " values");
      }
      own = {numbers + rows, numbers + columns, num_columns, count};
      if (num_columns == 1 && size > 0) {  // one long row has the same products, and is faster
        std::swap(own.rows, own.columns);
        own.num_columns = num_rows;
      }
    }
    return ffi::Error::Success();
  }
  // The units of every batch element; the leaf index varies fastest.
  std::vector<LeafUnits> all(int64_t batch) const {
    std::vector<LeafUnits> out;
    out.reserve(batch * first.size());
    for (int64_t b = 0; b < batch; ++b) {
      for (LeafUnits own : first) {
        if (own.rows != nullptr) own.rows += b * 2 * count, own.columns += b * 2 * count;
        out.push_back(own);
      }
    }
    return out;
  }
};

// Moves the last operand, the array of all units, to `units` if a leaf has any.
inline ffi::Error split_units(const std::string& call, const LayoutAttributes& attributes,
                              Leaves* operands, Leaves* units) {
  CGX_TRY(check_units(call, attributes));
  if (!attributes.have_units()) return ffi::Error::Success();
  const size_t wanted = attributes.leaves() + 1, given = operands->size.size();
  if (given < wanted) {
    return must_be(call, "number of operands", given,
                   "at least " + std::to_string(wanted) + ", the leaves and their units");
  }
  return operands->split(call, given - 1, units);
}

// Returns the leaves with the dtypes of their sums. That of a gather-sum is fp32 for a leaf that
// has units, because it is still in these units.
template <Collective kCollective>
Leaves sums_of(Leaves leaves, const LayoutAttributes& attributes) {
  for (size_t k = 0; k < leaves.dtype.size() && kCollective == Collective::kGatherSum; ++k) {
    if (attributes.has_units(k)) leaves.dtype[k] = DType::kF32;
  }
  return leaves;
}

}  // namespace cgx

#endif  // CGX_HANDLERS_OPERANDS_H_
