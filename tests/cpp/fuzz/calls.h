// A call of a handler as data: first made right, then damaged, then turned into a frame. The heap
// block of every array ends where the array ends, so that the address sanitizer sees each byte past
// it.
#ifndef CGX_TESTS_FUZZ_CALLS_H_
#define CGX_TESTS_FUZZ_CALLS_H_

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "fuzz/fuzz.h"
#include "handlers/frames.h"

namespace fuzz {

using Ints = std::vector<int64_t>;
using Attribute = std::variant<int64_t, float, Ints, std::string>;

inline int64_t item_bytes(XLA_FFI_DataType type) {
  switch (type) {
    case XLA_FFI_DataType_U8:
    case XLA_FFI_DataType_S8:
    case XLA_FFI_DataType_PRED:
      return 1;
    case XLA_FFI_DataType_F16:
    case XLA_FFI_DataType_BF16:
    case XLA_FFI_DataType_U16:
      return 2;
    case XLA_FFI_DataType_F64:
    case XLA_FFI_DataType_S64:
      return 8;
    default:
      return 4;
  }
}

constexpr int64_t kMostItems = 1 << 18;  // of a damaged array

struct Array {
  XLA_FFI_DataType type;
  Ints dims;
  std::unique_ptr<char[]> block;
  char* data = nullptr;

  // The number of items, or -1 if the product overflows, which XLA refuses before calling a
  // handler.
  int64_t items() const {
    int64_t all = 1;
    for (const int64_t dim : dims) {
      if (__builtin_mul_overflow(all, dim, &all)) return -1;
    }
    return all;
  }
  int64_t bytes() const { return items() * item_bytes(type); }

  // XLA aligns what it allocates. Kernels take values of any alignment of their dtype, so some
  // arrays start further on. Arrays of bytes hold records and keep their alignment.
  void allocate(Random& random) {
    const int64_t step = item_bytes(type) == 1 ? 16 : item_bytes(type);
    const int64_t before = random.chance(4) ? random.below(16) * step : 0;
    block.reset(new char[before + bytes()]);
    data = block.get() + before;
    fill(random);
  }

 private:
  // Fills the array with zeros, any bits, or floats with one exponent. Now and then, all items get
  // the same value, or runs of them are zeros.
  void fill(Random& random) {
    const int64_t size = item_bytes(type);
    if (random.chance(8)) {
      std::memset(data, 0, bytes());
      return;
    }
    random.fill(data, bytes());
    if (type == XLA_FFI_DataType_F32 && !random.chance(3)) {
      const uint32_t exponent = static_cast<uint32_t>(random.within(1, 254)) << 23;
      for (int64_t i = 0; i < bytes(); i += size) {
        uint32_t one;
        std::memcpy(&one, data + i, sizeof(one));
        one = (one & 0x807fffffu) | exponent;
        std::memcpy(data + i, &one, sizeof(one));
      }
    }
    if (random.chance(6)) {
      for (int64_t i = size; i < bytes(); i += size) std::memcpy(data + i, data, size);
    }
    if (random.chance(2)) {
      const int64_t run = size * random.of<int64_t>({1, 2, 16, 20, 50, 512});
      const int64_t one_in = random.of<int64_t>({2, 20});
      for (int64_t i = 0; i < bytes(); i += run) {
        if (random.chance(one_in)) std::memset(data + i, 0, std::min(run, bytes() - i));
      }
    }
  }
};

struct Call {
  std::vector<Array> args, rets;
  std::map<std::string, Attribute> attributes;
  std::vector<std::pair<size_t, size_t>> shared;  // (a result, the operand whose memory it uses)

  Array& arg(Random& random, XLA_FFI_DataType type, Ints dims) {
    args.push_back({type, std::move(dims), nullptr});
    args.back().allocate(random);
    return args.back();
  }
  void ret(Random& random, XLA_FFI_DataType type, Ints dims) {
    rets.push_back({type, std::move(dims), nullptr});
    rets.back().allocate(random);
  }
  // An operand of ranks or places in [least, most].
  void places(Random& random, Ints dims, int64_t least, int64_t most) {
    Array& made = arg(random, XLA_FFI_DataType_S32, std::move(dims));
    for (int64_t i = 0; i < made.items(); ++i) {
      const int32_t one = static_cast<int32_t>(random.within(least, most));
      std::memcpy(made.data + 4 * i, &one, sizeof(one));
    }
  }

  void fill(Frame* frame) const {
    for (const Array& own : args) frame->arg(own.type, own.data, own.dims);
    for (size_t i = 0; i < rets.size(); ++i) {
      const Array* own = &rets[i];
      for (const auto& [result, operand] : shared) {
        if (result != i || operand >= args.size()) continue;
        const Array& other = args[operand];
        if (other.type == own->type && other.dims == own->dims) own = &other;
      }
      frame->ret(own->type, own->data, rets[i].dims);
    }
    for (const auto& named : attributes) {
      const std::string& name = named.first;
      std::visit([&](const auto& value) { set(frame, name, value); }, named.second);
    }
  }

 private:
  template <typename Value>
  static void set(Frame* frame, const std::string& name, const Value& value) {
    frame->attr(name, value);
  }
  static void set(Frame* frame, const std::string& name, const std::string& value) {
    frame->attr(name, value.c_str());
  }
};

inline void damage_attribute(Random& random, Call* call) {
  if (call->attributes.empty()) return;
  auto at = call->attributes.begin();
  std::advance(at, random.below(static_cast<int64_t>(call->attributes.size())));
  Attribute& value = at->second;
  if (random.chance(12)) {
    call->attributes.erase(at);
  } else if (random.chance(12)) {
    const int64_t kind = random.below(4);
    if (kind == 0) value = random.hostile();
    if (kind == 1) value = static_cast<float>(random.hostile());
    if (kind == 2) value = Ints{random.hostile()};
    if (kind == 3) value = std::string("text");
  } else if (auto* whole = std::get_if<int64_t>(&value)) {
    *whole = random.hostile();
  } else if (auto* real = std::get_if<float>(&value)) {
    random.fill(real, sizeof(*real));
  } else if (auto* list = std::get_if<Ints>(&value)) {
    const int64_t size = static_cast<int64_t>(list->size());
    if (size == 0 || random.chance(8)) {
      list->push_back(random.hostile());
    } else if (random.chance(8)) {
      list->resize(random.below(size));
    } else {
      (*list)[random.below(size)] = random.hostile();
    }
  } else {
    std::get<std::string>(value) = std::string(random.below(200), static_cast<char>(random.word()));
  }
}

inline void damage_arrays(Random& random, Call* call) {
  std::vector<Array>& arrays = random.chance(2) ? call->args : call->rets;
  const int64_t size = static_cast<int64_t>(arrays.size());
  if (size == 0 || random.chance(12)) {
    arrays.push_back({XLA_FFI_DataType_F32, {random.size(600)}, nullptr});
    return arrays.back().allocate(random);
  }
  Array& own = arrays[random.below(size)];
  if (random.chance(12)) {
    arrays.erase(arrays.begin() + random.below(size));
    return;
  }
  if (random.chance(6)) return std::swap(own, arrays[random.below(size)]);
  const Ints before = own.dims;
  const int64_t dims = static_cast<int64_t>(own.dims.size());
  if (random.chance(6)) {
    own.type = random.of({XLA_FFI_DataType_U8, XLA_FFI_DataType_S8, XLA_FFI_DataType_PRED,
                          XLA_FFI_DataType_U16, XLA_FFI_DataType_F16, XLA_FFI_DataType_BF16,
                          XLA_FFI_DataType_S32, XLA_FFI_DataType_U32, XLA_FFI_DataType_F32,
                          XLA_FFI_DataType_S64, XLA_FFI_DataType_F64});
  } else if (dims == 0 || random.chance(8)) {
    own.dims.insert(own.dims.begin() + random.below(dims + 1), random.of<int64_t>({0, 1, 2}));
  } else if (random.chance(8)) {
    own.dims.erase(own.dims.begin() + random.below(dims));
  } else {
    for (int64_t k = random.within(1, 2); k > 0; --k) {
      int64_t& dim = own.dims[random.below(dims)];
      const uint64_t any = static_cast<uint64_t>(random.hostile()) >> 1;
      dim = random.chance(3) ? 0
            : random.chance(2)
                ? static_cast<int64_t>(any)
                : std::max<int64_t>(0, std::min(dim, kMostItems) + random.within(-1, 1));
    }
  }
  if (own.items() < 0 || own.items() > kMostItems) own.dims = before;
  own.allocate(random);
}

// Damages a call in any way in which a caller may get it wrong.
inline void damage(Random& random, Call* call) {
  for (int64_t k = random.of<int64_t>({1, 1, 1, 2, 3}); k > 0; --k) {
    random.chance(2) ? damage_attribute(random, call) : damage_arrays(random, call);
  }
}

}  // namespace fuzz

#endif  // CGX_TESTS_FUZZ_CALLS_H_
