// Makes right calls of the codec's handlers, as xla_ffi/handlers/operands.h describes them.
#ifndef CGX_TESTS_FUZZ_CODEC_H_
#define CGX_TESTS_FUZZ_CODEC_H_

#include <algorithm>

#include "format/layout.h"
#include "fuzz/calls.h"

namespace fuzz {

// The segment of a leaf.
inline int64_t some_segment(Random& random, int64_t bucket) {
  const int64_t shortest = bucket / cgx::kMaskBits;
  if (random.chance(3)) return shortest << random.below(6);
  if (random.chance(3)) return random.of<int64_t>({bucket, bucket + 1, 3 * bucket, cgx::kMaxSize});
  return (bucket - 2) / (cgx::kMaskBits - 1) + 1 + random.below(bucket);
}

// Longer than every bucket that is drawn.
constexpr int64_t kLongestBucket = int64_t{1} << 30;

// The leaves of a call. Each has a dtype, and two arrays of units or none. Those with units have
// buckets of up to `in_units`.
struct Leaves {
  int64_t batch, world;
  std::vector<cgx::SlotSpec> specs;
  std::vector<XLA_FFI_DataType> types;
  cgx::OwnedLayout owned;
  Ints slots;
  int64_t units = 0;  // the length of the array of all units, one way

  Leaves(Random& random, int64_t batch, int64_t world, int64_t most, int64_t in_units)
      : batch(batch), world(world) {
    for (int64_t k = random.of<int64_t>({0, 1, 1, 1, 2, 3}); k > 0; --k) {
      const int64_t bucket =
          random.chance(2) ? 512 : random.of<int64_t>({32, 64, 96, 256, 1024, kLongestBucket});
      specs.push_back({random.size(most), random.within(1, 8), bucket, random.below(3),
                       random.below(5), random.below(2),
                       random.chance(2) ? some_segment(random, bucket) : 0});
      types.push_back(random.of({XLA_FFI_DataType_F32, XLA_FFI_DataType_F32, XLA_FFI_DataType_BF16,
                                 XLA_FFI_DataType_F16}));
      const cgx::SlotSpec& own = specs.back();
      for (const int64_t number :
           {own.bits, own.bucket_size, own.rounding, own.number, own.rotation, own.segment}) {
        slots.push_back(number);
      }
      const bool has_units = bucket <= in_units && own.size > 0 && random.chance(2);
      for (const int64_t number : has_units ? place(random, own.size) : Ints{0, 0, 0}) {
        slots.push_back(number);
      }
    }
    build();
  }
  // Builds the layout with the leaves repeated for each of `rows` rows.
  void build(int64_t rows = 1) {
    std::vector<cgx::SlotSpec> all;
    for (int64_t r = 0; r < rows; ++r) all.insert(all.end(), specs.begin(), specs.end());
    if (const std::string error = owned.build(all, world); !error.empty()) fail(error);
  }
  int64_t row() const { return owned.view().chunk_bytes; }

  void add_args(Random& random, Call* call, int64_t rows = 1) const {
    for (size_t k = 0; k < specs.size(); ++k) call->arg(random, types[k], dims(k, rows));
  }
  void add_rets(Random& random, Call* call, int64_t rows = 1) const {
    for (size_t k = 0; k < specs.size(); ++k) call->ret(random, types[k], dims(k, rows));
  }
  void add_units(Random& random, Call* call) const {
    if (units > 0) call->arg(random, XLA_FFI_DataType_F32, {batch, 2, units});
  }
  void add_attributes(Call* call) const {
    call->attributes["slots"] = slots;
    call->attributes["world"] = world;
  }
  // Those of a call on the communicator of all ranks.
  void add_attributes(Call* call, const char* name) const {
    add_attributes(call);
    Ints group;
    for (int64_t r = 0; r < world; ++r) group.push_back(r);
    call->attributes["groups"] = group;
    call->attributes["divisor"] = static_cast<float>(world);
    call->attributes["name"] = std::string(name);
  }

 private:
  // Finds room for the units of a leaf, which may share some with another leaf.
  Ints place(Random& random, int64_t size) {
    int64_t rows = random.within(1, 20);
    while (size % rows != 0) --rows;
    if (random.chance(2)) rows = size / rows;
    const int64_t first = random.below(units + 1), columns = size / rows;
    units = std::max(units, first + rows + columns);
    return {columns, first, first + rows};
  }
  Ints dims(size_t k, int64_t rows) const { return {batch * rows, specs[k].size}; }
};

inline int64_t some_world(Random& random) {
  return random.chance(32) ? random.within(1, 70) : random.within(1, 5);
}

// A leaf has about `most` values at most. The device takes units of buckets of up to `in_units`.
inline Call encode_call(Random& random, int64_t most, int64_t in_units) {
  Call call;
  const Leaves leaves(random, random.of<int64_t>({1, 1, 1, 3}), some_world(random), most, in_units);
  call.arg(random, XLA_FFI_DataType_U32, {leaves.batch, 2});
  call.places(random, {leaves.batch}, -1, leaves.world - 1);
  leaves.add_args(random, &call);
  leaves.add_units(random, &call);
  call.ret(random, XLA_FFI_DataType_U8, {leaves.batch, leaves.world, leaves.row()});
  if (random.chance(2)) leaves.add_rets(random, &call);
  leaves.add_attributes(&call);
  return call;
}

inline Call reduce_call(Random& random, int64_t most, int64_t in_units) {
  Call call;
  const Leaves leaves(random, random.of<int64_t>({1, 1, 1, 3}), some_world(random), most, in_units);
  call.arg(random, XLA_FFI_DataType_U32, {leaves.batch, 2});
  call.places(random, {leaves.batch}, 0, leaves.world - 1);
  call.arg(random, XLA_FFI_DataType_U8, {leaves.batch, leaves.world, leaves.row()});
  leaves.add_args(random, &call);
  call.ret(random, XLA_FFI_DataType_U8, {leaves.batch, leaves.row()});
  if (random.chance(2)) {
    for (size_t k = 0; k < leaves.specs.size(); ++k) {
      call.shared.emplace_back(call.rets.size() + k, call.args.size() + k);
    }
    leaves.add_args(random, &call);
    leaves.add_rets(random, &call);
  }
  leaves.add_units(random, &call);
  leaves.add_attributes(&call);
  call.attributes["divisor"] = static_cast<float>(leaves.world);
  return call;
}

inline Call decode_call(Random& random, int64_t most, int64_t in_units) {
  Call call;
  const Leaves leaves(random, random.of<int64_t>({1, 1, 1, 3}), some_world(random), most, in_units);
  call.arg(random, XLA_FFI_DataType_U8, {leaves.batch, leaves.world, leaves.row()});
  leaves.add_units(random, &call);
  leaves.add_rets(random, &call);
  leaves.add_attributes(&call);
  return call;
}

inline Call accumulate_call(Random& random, int64_t most, int64_t) {
  Call call;
  const Leaves leaves(random, random.of<int64_t>({1, 1, 1, 3}), 1, most, 0);
  const int64_t peers = some_world(random);
  call.places(random, {leaves.batch}, -1, peers - 1);
  call.arg(random, XLA_FFI_DataType_U8, {leaves.batch, peers, leaves.row()});
  leaves.add_args(random, &call);
  leaves.add_rets(random, &call);
  leaves.add_attributes(&call);
  call.attributes["divisor"] = static_cast<float>(peers);
  return call;
}

inline Call find_call(Random& random, int64_t most, int64_t) {
  Call call;
  const Leaves leaves(random, random.of<int64_t>({1, 1, 1, 3}), 1, most, 0);
  leaves.add_args(random, &call);
  const int64_t count = static_cast<int64_t>(leaves.specs.size());
  call.ret(random, XLA_FFI_DataType_S32, {leaves.batch, count, 2});
  return call;
}

using MakeCodec = Call (*)(Random& random, int64_t most, int64_t in_units);
// The function that makes calls of a target; null if the target is one of codes.
inline MakeCodec codec_maker(const std::string& target) {
  const std::pair<const char*, MakeCodec> all[] = {
      {"cgx_encode", encode_call},       {"cgx_reduce", reduce_call},
      {"cgx_decode", decode_call},       {"cgx_accumulate", accumulate_call},
      {"cgx_find_nonfinite", find_call},
  };
  for (const auto& [name, make] : all) {
    if (name == target) return make;
  }
  return nullptr;
}

}  // namespace fuzz

#endif  // CGX_TESTS_FUZZ_CODEC_H_
