// Checks the operands of each call, then hands raw pointers to the kernels.
#include "handlers/cpu.h"

#include <vector>

#include "cpu/kernels.h"
#include "cpu/nonfinite.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"
#include "handlers/fresh_results.h"
#include "handlers/operands.h"

namespace cgx {
namespace {

constexpr bool kTakesUnits = true;
constexpr int64_t kValuesLookedAt = 8;  // in the time that encoding one value takes

ffi::Error encode(ffi::ThreadPool pool, Keys key, Ranks rank, ffi::RemainingArgs args,
                  ffi::Result<Payload> payload, ffi::RemainingRets rets, Ints slots,
                  int64_t world) {
  const char* const name = "cgx_encode";
  return no_throw(name, [&]() -> ffi::Error {
    Operands operands;
    CGX_TRY(check_encode(name, key, rank, args, *payload, rets, {slots, world, 1, kTakesUnits},
                         &operands));
    CGX_TRY(check_ranks(name, rank, -1, world));
    const int64_t batch = operands.batch;
    const Layout layout = operands.layout();
    prefer_huge_pages(operands.results, batch);
    prefer_huge_pages(payload->typed_data(), batch * world * layout.chunk_bytes);
    const auto from = operands.leaves.pointers(batch), to = operands.results.pointers(batch);
    const size_t n = operands.num_leaves();
    const auto of_units = operands.units.all(batch);
    const auto call = [&](int64_t b) {
      return EncodeCall{layout,
                        {from.data() + b * n, operands.leaves.dtype.data()},
                        {to.empty() ? nullptr : to.data() + b * n, operands.results.dtype.data()},
                        key.typed_data() + 2 * b,
                        rank.typed_data()[b],
                        payload->typed_data() + b * world * layout.chunk_bytes,
                        nullptr,
                        of_units.empty() ? nullptr : of_units.data() + b * n};
    };
    const KernelTable& kernels = current_kernels();
    for (int64_t b = 0; b < batch; ++b) zero_tails(layout, call(b).payload);
    const int64_t count = pieces(layout.values);
    Scratch scratch(workers(pool, batch * count), operands.owned.staged_scratch_values());
    split_range(pool, batch, 0, layout.total_bytes(), count,
                [&](int64_t b, int64_t first, int64_t last, int64_t worker) {
                  EncodeCall own = call(b);
                  own.scratch = scratch.of(worker);
                  kernels.encode(own, first, last);
                });
    return ffi::Error::Success();
  });
}

ffi::Error reduce(ffi::ThreadPool pool, Keys key, Ranks rank, Payload payload,
                  ffi::RemainingArgs args, ffi::Result<Payload> chunk, ffi::RemainingRets rets,
                  Ints slots, int64_t world, float divisor) {
  const char* const name = "cgx_reduce";
  return no_throw(name, [&]() -> ffi::Error {
    Operands operands;
    CGX_TRY(check_reduce(name, key, rank, payload, args, *chunk, rets,
                         {slots, world, 1, kTakesUnits}, divisor, &operands));
    CGX_TRY(check_ranks(name, rank, 0, world));
    const Layout layout = operands.layout();
    const auto from = operands.leaves.pointers(operands.batch);
    const auto lost = operands.results.pointers(operands.batch);
    const size_t n = operands.num_leaves();
    const auto of_units = operands.units.all(operands.batch);
    const int64_t count = pieces(layout.values / world);
    const int64_t tasks = operands.batch * count;
    Scratch scratch(workers(pool, tasks), operands.owned.scratch_values());
    const KernelTable& kernels = current_kernels();
    // Chunks differ in length, so each batch element cuts its own.
    parallel_for(pool, tasks, [&](int64_t task, int64_t worker) {
      const int64_t b = task / count, piece = task % count, own = rank.typed_data()[b];
      uint8_t* const out = chunk->typed_data() + b * layout.chunk_bytes;
      const int64_t begin = layout.begin[own], used = layout.chunk_size(own);
      if (piece == 0) std::fill(out + used, out + layout.chunk_bytes, uint8_t{0});
      kernels.reduce({layout,
                      {from.data() + b * n, operands.leaves.dtype.data()},
                      key.typed_data() + 2 * b,
                      own,
                      payload.typed_data() + b * world * layout.chunk_bytes,
                      divisor,
                      out,
                      scratch.of(worker),
                      {lost.empty() ? nullptr : lost.data() + b * n, operands.leaves.dtype.data()},
                      of_units.empty() ? nullptr : of_units.data() + b * n},
                     begin + chunk_cut(piece, used, count),
                     begin + chunk_cut(piece + 1, used, count));
    });
    return ffi::Error::Success();
  });
}

ffi::Error decode(ffi::ThreadPool pool, Payload payload, ffi::RemainingArgs args,
                  ffi::RemainingRets rets, Ints slots, int64_t world) {
  const char* const name = "cgx_decode";
  return no_throw(name, [&]() -> ffi::Error {
    Operands operands;
    Leaves unit_operands;
    const LayoutAttributes attributes{slots, world, 1, kTakesUnits};
    CGX_TRY(check_decode(name, payload, rets, attributes, &operands));
    CGX_TRY(unit_operands.add(name, args, operands.batch));
    CGX_TRY(check_number(name, "units", args.size(), 2 * attributes.num_units()));
    CGX_TRY(operands.units.add(name, operands.leaves, unit_operands, attributes));
    prefer_huge_pages(operands.leaves, operands.batch);
    const Layout layout = operands.layout();
    const auto to = operands.leaves.pointers(operands.batch);
    const size_t n = operands.num_leaves();
    const auto of_units = operands.units.all(operands.batch);
    const KernelTable& kernels = current_kernels();
    const int64_t count = pieces(layout.values);
    Scratch scratch(workers(pool, operands.batch * count), operands.owned.staged_scratch_values());
    split_range(pool, operands.batch, 0, layout.total_bytes(), count,
                [&](int64_t b, int64_t first, int64_t last, int64_t worker) {
                  kernels.decode({layout,
                                  payload.typed_data() + b * world * layout.chunk_bytes,
                                  {to.data() + b * n, operands.leaves.dtype.data()},
                                  scratch.of(worker),
                                  of_units.empty() ? nullptr : of_units.data() + b * n},
                                 first, last);
                });
    return ffi::Error::Success();
  });
}

ffi::Error accumulate(ffi::ThreadPool pool, Ranks rank, Payload payload, ffi::RemainingArgs args,
                      ffi::RemainingRets rets, Ints slots, int64_t world, float divisor) {
  const char* const name = "cgx_accumulate";
  return no_throw(name, [&]() -> ffi::Error {
    Operands operands;
    int64_t peers = 0;
    CGX_TRY(check_accumulate(name, rank, payload, args, rets, {slots, world}, divisor, &operands,
                             &peers));
    CGX_TRY(check_ranks(name, rank, -1, peers));
    prefer_huge_pages(operands.results, operands.batch);
    const Layout layout = operands.layout();
    const auto from = operands.leaves.pointers(operands.batch);
    const auto to = operands.results.pointers(operands.batch);
    const size_t n = operands.num_leaves();
    const DType* const dtypes = operands.leaves.dtype.data();
    const KernelTable& kernels = current_kernels();
    const int64_t count = pieces(layout.values);
    Scratch scratch(workers(pool, operands.batch * count), operands.owned.scratch_values());
    split_range(pool, operands.batch, 0, layout.total_bytes(), count,
                [&](int64_t b, int64_t first, int64_t last, int64_t worker) {
                  kernels.accumulate({layout,
                                      {from.data() + b * n, dtypes},
                                      payload.typed_data() + b * peers * layout.total_bytes(),
                                      peers,
                                      rank.typed_data()[b],
                                      divisor,
                                      {to.data() + b * n, dtypes},
                                      scratch.of(worker)},
                                     first, last);
                });
    return ffi::Error::Success();
  });
}

// (leaves) -> found
ffi::Error find(ffi::ThreadPool pool, ffi::RemainingArgs args,
                ffi::Result<ffi::Buffer<ffi::S32, 3>> found) {
  const char* const name = "cgx_find_nonfinite";
  return no_throw(name, [&]() -> ffi::Error {
    const int64_t batch = found->dimensions()[0];
    CGX_TRY(check_batch(name, batch));
    Leaves leaves;
    CGX_TRY(leaves.add(name, args, batch));
    const size_t n = leaves.size.size();
    CGX_TRY(check_number(name, "leaves", n, found->dimensions()[1]));
    CGX_TRY(check_number(name, "numbers per leaf", found->dimensions()[2], 2));
    if (n == 0) return ffi::Error::Success();
    std::vector<SearchedLeaf> all;
    int64_t values = 0;
    for (void* const data : leaves.pointers(batch)) {
      const size_t k = all.size() % n;
      all.push_back({data, leaves.dtype[k], leaves.size[k]});
      values += leaves.size[k];
    }
    NonFiniteTable table(found->typed_data(), all.size());
    split_range(pool, 1, 0, values, pieces(values / kValuesLookedAt),
                [&](int64_t, int64_t first, int64_t last, int64_t) {
                  find_nonfinite(all, first, last, table);
                });
    return ffi::Error::Success();
  });
}

}  // namespace

XLA_FFI_Error* encode_handler(XLA_FFI_CallFrame* frame) {
  static const auto handler = bind_encode<ffi::ThreadPool>().To(encode);
  return handler->Call(frame);
}

XLA_FFI_Error* reduce_handler(XLA_FFI_CallFrame* frame) {
  static const auto handler = bind_reduce<ffi::ThreadPool>().To(reduce);
  return handler->Call(frame);
}

XLA_FFI_Error* decode_handler(XLA_FFI_CallFrame* frame) {
  static const auto handler =
      with_layout(
          ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<Payload>().RemainingArgs().RemainingRets())
          .To(decode);
  return handler->Call(frame);
}

XLA_FFI_Error* accumulate_handler(XLA_FFI_CallFrame* frame) {
  static const auto handler = bind_accumulate<ffi::ThreadPool>().To(accumulate);
  return handler->Call(frame);
}

XLA_FFI_Error* find_nonfinite_handler(XLA_FFI_CallFrame* frame) {
  static const auto handler =
      ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().RemainingArgs().Ret<ffi::Buffer<ffi::S32, 3>>().To(
          find);
  return handler->Call(frame);
}

}  // namespace cgx
