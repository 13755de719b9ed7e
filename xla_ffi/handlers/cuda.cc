// Checks the operands of each call, then puts kernels on XLA's stream. Nothing here waits, reads
// device memory or allocates it, so XLA may record the calls into command buffers.
#include "handlers/cuda.h"

#include "cuda/codec.h"
#include "handlers/operands.h"

namespace cgx {
namespace {

using Stream = ffi::PlatformStream<cudaStream_t>;

ffi::Error launched(const char* call, cudaError_t error) {
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string(call) + ": CUDA: " + cudaGetErrorString(error));
}

ffi::Error run_encode(cudaStream_t stream, Keys key, Ranks rank, ffi::RemainingArgs args,
                      ffi::Result<Payload> payload, ffi::RemainingRets rets, Ints slots,
                      int64_t world) {
  const char* const name = "cgx_encode";
  return no_throw(name, [&]() -> ffi::Error {
    Operands operands;
    CGX_TRY(check_encode(name, key, rank, args, *payload, rets, {slots, world}, &operands));
    const Layout layout = operands.layout();
    const auto from = operands.leaves.pointers(operands.batch);
    const auto to = operands.results.pointers(operands.batch);
    const size_t n = operands.num_leaves();
    for (int64_t b = 0; b < operands.batch; ++b) {
      const CudaEncode call{
          layout,
          {from.data() + b * n, operands.leaves.dtype.data()},
          {to.empty() ? nullptr : to.data() + b * n, operands.results.dtype.data()},
          key.typed_data() + 2 * b,
          {rank.typed_data() + b, 0},
          payload->typed_data() + b * world * layout.chunk_bytes,
          true};
      CGX_TRY(launched(name, encode(call, {{0, layout.total_bytes()}}, stream)));
    }
    return ffi::Error::Success();
  });
}

ffi::Error run_reduce(cudaStream_t stream, Keys key, Ranks rank, Payload payload,
                      ffi::RemainingArgs args, ffi::Result<Payload> chunk, ffi::RemainingRets rets,
                      Ints slots, int64_t world, float divisor) {
  const char* const name = "cgx_reduce";
  return no_throw(name, [&]() -> ffi::Error {
    Operands operands;
    CGX_TRY(check_reduce(name, key, rank, payload, args, *chunk, rets, {slots, world}, divisor,
                         &operands));
    const Layout layout = operands.layout();
    const auto from = operands.leaves.pointers(operands.batch);
    const auto lost = operands.results.pointers(operands.batch);
    const size_t n = operands.num_leaves();
    for (int64_t b = 0; b < operands.batch; ++b) {
      const CudaReduce call{
          layout,
          {from.data() + b * n, operands.leaves.dtype.data()},
          key.typed_data() + 2 * b,
          {rank.typed_data() + b, 0},
          payload.typed_data() + b * world * layout.chunk_bytes,
          divisor,
          chunk->typed_data() + b * layout.chunk_bytes,
          true,
          {lost.empty() ? nullptr : lost.data() + b * n, operands.leaves.dtype.data()}};
      CGX_TRY(launched(name, reduce(call, {{0, layout.total_bytes()}}, stream)));
    }
    return ffi::Error::Success();
  });
}

ffi::Error run_decode(cudaStream_t stream, Payload payload, ffi::RemainingRets rets, Ints slots,
                      int64_t world) {
  const char* const name = "cgx_decode";
  return no_throw(name, [&]() -> ffi::Error {
    Operands operands;
    CGX_TRY(check_decode(name, payload, rets, {slots, world}, &operands));
    const Layout layout = operands.layout();
    const auto to = operands.leaves.pointers(operands.batch);
    const size_t n = operands.num_leaves();
    for (int64_t b = 0; b < operands.batch; ++b) {
      const CudaDecode call{layout,
                            payload.typed_data() + b * world * layout.chunk_bytes,
                            {to.data() + b * n, operands.leaves.dtype.data()}};
      CGX_TRY(launched(name, decode(call, {{0, layout.total_bytes()}}, stream)));
    }
    return ffi::Error::Success();
  });
}

ffi::Error run_accumulate(cudaStream_t stream, Ranks rank, Payload payload, ffi::RemainingArgs args,
                          ffi::RemainingRets rets, Ints slots, int64_t world, float divisor) {
  const char* const name = "cgx_accumulate";
  return no_throw(name, [&]() -> ffi::Error {
    Operands operands;
    int64_t peers = 0;
    CGX_TRY(check_accumulate(name, rank, payload, args, rets, {slots, world}, divisor, &operands,
                             &peers));
    const Layout layout = operands.layout();
    const auto from = operands.leaves.pointers(operands.batch);
    const auto to = operands.results.pointers(operands.batch);
    const size_t n = operands.num_leaves();
    const DType* const dtypes = operands.leaves.dtype.data();
    for (int64_t b = 0; b < operands.batch; ++b) {
      const CudaAccumulate call{layout,
                                {from.data() + b * n, dtypes},
                                payload.typed_data() + b * peers * layout.total_bytes(),
                                peers,
                                {rank.typed_data() + b, 0},
                                divisor,
                                {to.data() + b * n, dtypes}};
      CGX_TRY(launched(name, accumulate(call, {{0, layout.total_bytes()}}, stream)));
    }
    return ffi::Error::Success();
  });
}

}  // namespace

XLA_FFI_Error* encode_cuda_handler(XLA_FFI_CallFrame* frame) {
  static const auto handler =
      bind_encode<Stream>().To(run_encode, {ffi::Traits::kCmdBufferCompatible});
  return handler->Call(frame);
}

XLA_FFI_Error* reduce_cuda_handler(XLA_FFI_CallFrame* frame) {
  static const auto handler =
      bind_reduce<Stream>().To(run_reduce, {ffi::Traits::kCmdBufferCompatible});
  return handler->Call(frame);
}

XLA_FFI_Error* decode_cuda_handler(XLA_FFI_CallFrame* frame) {
  static const auto handler =
      with_layout(ffi::Ffi::Bind().Ctx<Stream>().Arg<Payload>().RemainingRets())
          .To(run_decode, {ffi::Traits::kCmdBufferCompatible});
  return handler->Call(frame);
}

XLA_FFI_Error* accumulate_cuda_handler(XLA_FFI_CallFrame* frame) {
  static const auto handler =
      bind_accumulate<Stream>().To(run_accumulate, {ffi::Traits::kCmdBufferCompatible});
  return handler->Call(frame);
}

}  // namespace cgx
