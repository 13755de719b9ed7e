// XLA FFI handlers of the all-reduce over peers' memory. They need the collectives extension, as
// those of handlers/nccl.h do, and share their stage Prepare.
#ifndef CGX_HANDLERS_PEER_H_
#define CGX_HANDLERS_PEER_H_

#include "handlers/nccl.h"

#if CGX_HAVE_COLLECTIVES
namespace cgx {

// (keys of both phases, leaves) -> leaves [, residuals]. The stage Initialize makes the window of
// the communicator, once; all ranks have to come to it.
XLA_FFI_Error* all_reduce_peer_initialize(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* all_reduce_peer_execute(XLA_FFI_CallFrame* frame);

}  // namespace cgx
#endif

#endif  // CGX_HANDLERS_PEER_H_
