// What the handlers share: checks of operands and attributes, with the value and the limit.
// A call carries a batch of independent fusion buffers, so that vmap needs no loop; operands lead
// with the batch, and only element counts matter past that, so that a leaf is passed in whatever
// shape it has.
#ifndef CGX_OPERANDS_H_
#define CGX_OPERANDS_H_

#include <cmath>
#include <new>
#include <string>
#include <vector>

#include "kernels_cpu.h"
#include "layout.h"
#include "xla/ffi/api/ffi.h"

namespace cgx {

namespace ffi = xla::ffi;

using Ints = ffi::Span<const int64_t>;
using Keys = ffi::Buffer<ffi::U32>;
using Ranks = ffi::Buffer<ffi::S32>;   // one a batch element, so it tells the batch
using Payload = ffi::Buffer<ffi::U8>;  // [batch,] rows, bytes

inline ffi::Error invalid(const std::string& call, const std::string& text) {
  return ffi::Error::InvalidArgument(call + ": " + text);
}

inline std::string expected(const std::string& what, int64_t value, int64_t limit) {
  return what + " is " + std::to_string(value) + ", expected " + std::to_string(limit);
}

// Leaves of all batch elements.
struct Leaves {
  std::vector<char*> data;
  std::vector<DType> dtype;
  std::vector<int64_t> size;  // values of one batch element

  ffi::Error add(const std::string& call, const ffi::AnyBuffer& buffer, int64_t batch) {
    const std::string name = "leaf " + std::to_string(size.size());
    const int64_t count = static_cast<int64_t>(buffer.element_count());
    if (count % batch != 0) {
      return invalid(call, name + " has " + std::to_string(count) +
                               " values, must be a multiple of the batch of " +
                               std::to_string(batch));
    }
    switch (buffer.element_type()) {
      case ffi::F32:
        dtype.push_back(DType::kF32);
        break;
      case ffi::BF16:
        dtype.push_back(DType::kBF16);
        break;
      case ffi::F16:
        dtype.push_back(DType::kF16);
        break;
      default:
        return invalid(call, "dtype of " + name + " is XLA type " +
                                 std::to_string(static_cast<int>(buffer.element_type())) +
                                 ", must be f32, bf16 or f16");
    }
    size.push_back(count / batch);
    data.push_back(static_cast<char*>(buffer.untyped_data()));
    return ffi::Error::Success();
  }

  ffi::Error add(const std::string& call, const ffi::RemainingArgs& args, int64_t batch) {
    for (size_t k = 0; k < args.size(); ++k) {
      auto buffer = args.get<ffi::AnyBuffer>(k);
      if (buffer.has_error()) return buffer.error();
      if (auto error = add(call, *buffer, batch); error.failure()) return error;
    }
    return ffi::Error::Success();
  }

  ffi::Error add(const std::string& call, const ffi::RemainingRets& rets, int64_t batch) {
    for (size_t k = 0; k < rets.size(); ++k) {
      auto buffer = rets.get<ffi::AnyBuffer>(k);
      if (buffer.has_error()) return buffer.error();
      if (auto error = add(call, **buffer, batch); error.failure()) return error;
    }
    return ffi::Error::Success();
  }

  // The pointers of every batch element, leaves fastest.
  std::vector<void*> pointers(int64_t batch) const {
    std::vector<void*> all;
    all.reserve(batch * data.size());
    for (int64_t b = 0; b < batch; ++b) {
      for (size_t k = 0; k < data.size(); ++k) {
        all.push_back(data[k] + b * size[k] * item_size(dtype[k]));
      }
    }
    return all;
  }
};

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

inline ffi::Error build_layout(const std::string& call, const Leaves& leaves, Ints bits,
                               Ints bucket_size, Ints stochastic, Ints stream, int64_t world,
                               OwnedLayout* layout) {
  const struct {
    const char* name;
    Ints values;
  } attributes[] = {
      {"bits", bits}, {"bucket_size", bucket_size}, {"stochastic", stochastic}, {"stream", stream}};
  for (const auto& attribute : attributes) {
    if (attribute.values.size() != leaves.size.size()) {
      return invalid(call, expected(std::string("length of ") + attribute.name,
                                    attribute.values.size(), leaves.size.size()));
    }
  }
  std::vector<LeafSpec> specs;
  for (size_t k = 0; k < leaves.size.size(); ++k) {
    specs.push_back({leaves.size[k], bits[k], bucket_size[k], stochastic[k], stream[k]});
  }
  const std::string error = layout->build(specs, world);
  return error.empty() ? ffi::Error::Success() : invalid(call, error);
}

template <typename Buffer>
ffi::Error check_count(const std::string& call, const std::string& what, const Buffer& buffer,
                       int64_t limit) {
  const int64_t count = static_cast<int64_t>(buffer.element_count());
  if (count == limit) return ffi::Error::Success();
  return invalid(call, expected("size of " + what, count, limit));
}

inline ffi::Error check_batch(const std::string& call, int64_t batch) {
  return batch > 0 ? ffi::Error::Success() : invalid(call, expected("batch", batch, 1));
}

inline ffi::Error check_ranks(const std::string& call, const Ranks& ranks, int64_t from,
                              int64_t to) {
  for (size_t b = 0; b < ranks.element_count(); ++b) {
    const int64_t rank = ranks.typed_data()[b];
    if (rank < from || rank >= to) {
      return invalid(call, "rank is " + std::to_string(rank) + ", must be in [" +
                               std::to_string(from) + ", " + std::to_string(to) + ")");
    }
  }
  return ffi::Error::Success();
}

inline ffi::Error check_divisor(const std::string& call, float divisor) {
  if (std::isfinite(divisor) && divisor != 0.0f) return ffi::Error::Success();
  return invalid(call, "divisor is " + std::to_string(divisor) + ", must be finite and not 0");
}

#define CGX_TRY(expression) \
  if (ffi::Error error = (expression); error.failure()) return error

template <typename F>
ffi::Error no_throw(const char* call, F&& f) {
  try {
    return f();
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, std::string(call) + ": out of memory");
  }
}

template <typename Binding>
auto with_layout(Binding&& binding) {
  return std::forward<Binding>(binding)
      .template Attr<Ints>("bits")
      .template Attr<Ints>("bucket_size")
      .template Attr<Ints>("stochastic")
      .template Attr<Ints>("stream")
      .template Attr<int64_t>("world");
}

}  // namespace cgx

#endif  // CGX_OPERANDS_H_
