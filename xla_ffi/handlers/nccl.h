// XLA FFI handlers of the calls on XLA's communicator. They need the runtime's collectives
// extension, which lends it, and without the extension's header they are not built.
//
// The fused calls are the all-reduce, its two halves, and gather-sum, which is an all-reduce in one
// phase. Their last result is u8[CudaFused::scratch_bytes()]: the payloads. They are a result
// because streams still use them when a handler returns, and only a result lives until the whole
// call is over.
#ifndef CGX_HANDLERS_NCCL_H_
#define CGX_HANDLERS_NCCL_H_

#include "schedule/schedule.h"
#include "xla/ffi/api/c_api.h"

#if __has_include("xla/ffi/api/collectives_c_api.h")
#define CGX_HAVE_COLLECTIVES 1
#else
#define CGX_HAVE_COLLECTIVES 0
#endif

#if CGX_HAVE_COLLECTIVES
namespace cgx {

// Requests the communicator of any of these calls before anything runs.
XLA_FFI_Error* nccl_prepare(XLA_FFI_CallFrame* frame);

// The Initialize stage creates everything that Execute uses on a device. Between the two stages the
// runtime waits for the group's other devices in this process.
struct Stages {
  XLA_FFI_Handler *initialize, *execute;
};

// Over NCCL.
// All-reduce: (keys of both phases, leaves) -> leaves [, residuals], payloads.
// Reduce-scatter: (keys[world], leaves[world]) -> leaves, payloads. The attributes describe one
// row; each row is encoded separately.
// Gather-sum: (key, leaves) -> leaves [, residuals], payloads.
// All-gather: (key, leaves) -> leaves[world], payloads.
Stages nccl_stages(Collective collective);

// The all-reduce over peers' memory: (keys of both phases, leaves [, units]) -> leaves [,
// residuals]. The Initialize stage creates the communicator's window once; all ranks have to take
// part.
Stages peer_stages();

}  // namespace cgx
#endif

#endif  // CGX_HANDLERS_NCCL_H_
