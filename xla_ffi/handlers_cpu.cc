// Checks the operands of each call, then hands raw pointers to the kernels.
#include "handlers_cpu.h"

#include <vector>

#include "kernels_cpu.h"
#include "operands.h"
#include "parallel.h"

namespace cgx {
namespace {

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
