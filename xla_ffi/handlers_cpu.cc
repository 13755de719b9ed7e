// Checks the operands of each call, then hands raw pointers to the kernels. A call carries a batch
// of independent fusion buffers, so that vmap needs no loop; operands lead with the batch, and only
// element counts matter past that, so that a leaf is passed in whatever shape it has.
#include "handlers_cpu.h"

#include <cmath>
#include <new>
#include <string>
#include <vector>

#include "kernels_cpu.h"
#include "layout.h"
#include "parallel.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace cgx {
namespace {

using Ints = ffi::Span<const int64_t>;
using Keys = ffi::Buffer<ffi::U32>;
using Ranks = ffi::Buffer<ffi::S32>;   // one a batch element, so it tells the batch
using Payload = ffi::Buffer<ffi::U8>;  // [batch,] rows, bytes

ffi::Error invalid(const std::string& call, const std::string& text) {
  return ffi::Error::InvalidArgument(call + ": " + text);
}

std::string expected(const std::string& what, int64_t value, int64_t limit) {
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

ffi::Error same_leaves(const std::string& call, const Leaves& in, const Leaves& out) {
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

ffi::Error build_layout(const std::string& call, const Leaves& leaves, Ints bits, Ints bucket_size,
                        Ints stochastic, Ints stream, int64_t world, OwnedLayout* layout) {
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

ffi::Error check_batch(const std::string& call, int64_t batch) {
  return batch > 0 ? ffi::Error::Success() : invalid(call, expected("batch", batch, 1));
}

ffi::Error check_ranks(const std::string& call, const Ranks& ranks, int64_t from, int64_t to) {
  for (size_t b = 0; b < ranks.element_count(); ++b) {
    const int64_t rank = ranks.typed_data()[b];
    if (rank < from || rank >= to) {
      return invalid(call, "rank is " + std::to_string(rank) + ", must be in [" +
                               std::to_string(from) + ", " + std::to_string(to) + ")");
    }
  }
  return ffi::Error::Success();
}

ffi::Error check_divisor(const std::string& call, float divisor) {
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

// (key, rank, leaves) -> payload [, residuals]
ffi::Error encode(ffi::ThreadPool pool, Keys key, Ranks rank, ffi::RemainingArgs args,
                  ffi::Result<Payload> payload, ffi::RemainingRets rets, Ints bits,
                  Ints bucket_size, Ints stochastic, Ints stream, int64_t world) {
  const char* const name = "cgx_encode";
  return no_throw(name, [&]() -> ffi::Error {
    const int64_t batch = rank.element_count();
    CGX_TRY(check_batch(name, batch));
    Leaves leaves, residuals;
    OwnedLayout owned;
    CGX_TRY(leaves.add(name, args, batch));
    CGX_TRY(residuals.add(name, rets, batch));
    if (rets.size() > 0) CGX_TRY(same_leaves(name, leaves, residuals));
    CGX_TRY(build_layout(name, leaves, bits, bucket_size, stochastic, stream, world, &owned));
    const Layout layout = owned.view();
    CGX_TRY(check_count(name, "key", key, batch * 2));
    CGX_TRY(check_count(name, "payload", *payload, batch * world * layout.chunk_bytes));
    CGX_TRY(check_ranks(name, rank, -1, world));
    const auto from = leaves.pointers(batch), to = residuals.pointers(batch);
    const size_t n = leaves.data.size();
    const auto call = [&](int64_t b) {
      return EncodeCall{layout,
                        {from.data() + b * n, leaves.dtype.data()},
                        {to.empty() ? nullptr : to.data() + b * n, residuals.dtype.data()},
                        key.typed_data() + 2 * b,
                        rank.typed_data()[b],
                        payload->typed_data() + b * world * layout.chunk_bytes};
    };
    const KernelTable& kernels = current_kernels();
    for (int64_t b = 0; b < batch; ++b) zero_tails(layout, call(b).payload);
    split_range(pool, batch, 0, layout.total_bytes(), pieces(owned.values()),
                [&](int64_t b, int64_t first, int64_t last, int64_t) {
                  kernels.encode(call(b), first, last);
                });
    return ffi::Error::Success();
  });
}

// (key, rank, payload, leaves) -> chunk
ffi::Error reduce(ffi::ThreadPool pool, Keys key, Ranks rank, Payload payload,
                  ffi::RemainingArgs args, ffi::Result<Payload> chunk, Ints bits, Ints bucket_size,
                  Ints stochastic, Ints stream, int64_t world, float divisor) {
  const char* const name = "cgx_reduce";
  return no_throw(name, [&]() -> ffi::Error {
    const int64_t batch = rank.element_count();
    CGX_TRY(check_batch(name, batch));
    Leaves leaves;
    OwnedLayout owned;
    CGX_TRY(leaves.add(name, args, batch));
    CGX_TRY(build_layout(name, leaves, bits, bucket_size, stochastic, stream, world, &owned));
    const Layout layout = owned.view();
    CGX_TRY(check_count(name, "key", key, batch * 2));
    CGX_TRY(check_count(name, "payload", payload, batch * world * layout.chunk_bytes));
    CGX_TRY(check_count(name, "chunk", *chunk, batch * layout.chunk_bytes));
    CGX_TRY(check_ranks(name, rank, 0, world));
    CGX_TRY(check_divisor(name, divisor));
    const auto from = leaves.pointers(batch);
    const size_t n = leaves.data.size();
    const int64_t count = pieces(owned.values() / world);
    std::vector<float> scratch(workers(pool, batch * count) * owned.longest_bucket());
    const KernelTable& kernels = current_kernels();
    // Chunks differ in length, so each batch element cuts its own.
    parallel_for(pool, batch * count, [&](int64_t task, int64_t worker) {
      const int64_t b = task / count, piece = task % count, own = rank.typed_data()[b];
      uint8_t* const out = chunk->typed_data() + b * layout.chunk_bytes;
      const int64_t begin = layout.begin[own], used = layout.chunk_size(own);
      if (piece == 0) std::fill(out + used, out + layout.chunk_bytes, uint8_t{0});
      kernels.reduce({layout,
                      {from.data() + b * n, leaves.dtype.data()},
                      key.typed_data() + 2 * b,
                      own,
                      payload.typed_data() + b * world * layout.chunk_bytes,
                      divisor,
                      out,
                      scratch.data() + worker * owned.longest_bucket()},
                     begin + chunk_cut(piece, used, count),
                     begin + chunk_cut(piece + 1, used, count));
    });
    return ffi::Error::Success();
  });
}

// (payload) -> leaves
ffi::Error decode(ffi::ThreadPool pool, Payload payload, ffi::RemainingRets rets, Ints bits,
                  Ints bucket_size, Ints stochastic, Ints stream, int64_t world) {
  const char* const name = "cgx_decode";
  return no_throw(name, [&]() -> ffi::Error {
    const auto dims = payload.dimensions();
    const int64_t batch = dims.size() == 3 ? dims[0] : 1;
    CGX_TRY(check_batch(name, batch));
    Leaves leaves;
    OwnedLayout owned;
    CGX_TRY(leaves.add(name, rets, batch));
    CGX_TRY(build_layout(name, leaves, bits, bucket_size, stochastic, stream, world, &owned));
    const Layout layout = owned.view();
    CGX_TRY(check_count(name, "payload", payload, batch * world * layout.chunk_bytes));
    const auto to = leaves.pointers(batch);
    const size_t n = leaves.data.size();
    const KernelTable& kernels = current_kernels();
    split_range(pool, batch, 0, layout.total_bytes(), pieces(owned.values()),
                [&](int64_t b, int64_t first, int64_t last, int64_t) {
                  kernels.decode({layout,
                                  payload.typed_data() + b * world * layout.chunk_bytes,
                                  {to.data() + b * n, leaves.dtype.data()}},
                                 first, last);
                });
    return ffi::Error::Success();
  });
}

// (rank, payload of all peers, leaves) -> leaves
ffi::Error accumulate(ffi::ThreadPool pool, Ranks rank, Payload payload, ffi::RemainingArgs args,
                      ffi::RemainingRets rets, Ints bits, Ints bucket_size, Ints stochastic,
                      Ints stream, int64_t world, float divisor) {
  const char* const name = "cgx_accumulate";
  return no_throw(name, [&]() -> ffi::Error {
    const int64_t batch = rank.element_count();
    const auto dims = payload.dimensions();
    CGX_TRY(check_batch(name, batch));
    if (dims.size() < 2) return invalid(name, expected("rank of payload", dims.size(), 2));
    const int64_t peers = dims[dims.size() - 2];
    Leaves leaves, sums;
    OwnedLayout owned;
    CGX_TRY(leaves.add(name, args, batch));
    CGX_TRY(sums.add(name, rets, batch));
    CGX_TRY(same_leaves(name, leaves, sums));
    if (world != 1) return invalid(name, expected("world", world, 1));
    CGX_TRY(build_layout(name, leaves, bits, bucket_size, stochastic, stream, world, &owned));
    const Layout layout = owned.view();
    CGX_TRY(check_count(name, "payload", payload, batch * peers * layout.total_bytes()));
    CGX_TRY(check_ranks(name, rank, -1, peers));
    CGX_TRY(check_divisor(name, divisor));
    const auto from = leaves.pointers(batch), to = sums.pointers(batch);
    const size_t n = leaves.data.size();
    const KernelTable& kernels = current_kernels();
    split_range(pool, batch, 0, layout.total_bytes(), pieces(owned.values()),
                [&](int64_t b, int64_t first, int64_t last, int64_t) {
                  kernels.accumulate({layout,
                                      {from.data() + b * n, leaves.dtype.data()},
                                      payload.typed_data() + b * peers * layout.total_bytes(),
                                      peers,
                                      rank.typed_data()[b],
                                      divisor,
                                      {to.data() + b * n, sums.dtype.data()}},
                                     first, last);
                });
    return ffi::Error::Success();
  });
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

}  // namespace

XLA_FFI_Error* encode_handler(XLA_FFI_CallFrame* frame) {
  static const auto handler = with_layout(ffi::Ffi::Bind()
                                              .Ctx<ffi::ThreadPool>()
                                              .Arg<Keys>()
                                              .Arg<Ranks>()
                                              .RemainingArgs()
                                              .Ret<Payload>()
                                              .RemainingRets())
                                  .To(encode);
  return handler->Call(frame);
}

XLA_FFI_Error* reduce_handler(XLA_FFI_CallFrame* frame) {
  static const auto handler = with_layout(ffi::Ffi::Bind()
                                              .Ctx<ffi::ThreadPool>()
                                              .Arg<Keys>()
                                              .Arg<Ranks>()
                                              .Arg<Payload>()
                                              .RemainingArgs()
                                              .Ret<Payload>())
                                  .Attr<float>("divisor")
                                  .To(reduce);
  return handler->Call(frame);
}

XLA_FFI_Error* decode_handler(XLA_FFI_CallFrame* frame) {
  static const auto handler =
      with_layout(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Payload>().RemainingRets())
          .To(decode);
  return handler->Call(frame);
}

XLA_FFI_Error* accumulate_handler(XLA_FFI_CallFrame* frame) {
  static const auto handler = with_layout(ffi::Ffi::Bind()
                                              .Ctx<ffi::ThreadPool>()
                                              .Arg<Ranks>()
                                              .Arg<Payload>()
                                              .RemainingArgs()
                                              .RemainingRets())
                                  .Attr<float>("divisor")
                                  .To(accumulate);
  return handler->Call(frame);
}

}  // namespace cgx
