// XLA FFI handlers of the all-reduce over peers' memory. Like the handlers of handlers/nccl.h, they
// need the collectives extension. They use the same Prepare stage, nccl_prepare.
#ifndef CGX_HANDLERS_PEER_H_
#define CGX_HANDLERS_PEER_H_

#include "handlers/nccl.h"

#if CGX_HAVE_COLLECTIVES
namespace cgx {

// (keys of both phases, leaves) -> leaves [, residuals]. The Initialize stage creates the
// communicator's window once; all ranks have to take part.
XLA_FFI_Error* all_reduce_peer_initialize(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* all_reduce_peer_execute(XLA_FFI_CallFrame* frame);

}  // namespace cgx
#endif

#endif  // CGX_HANDLERS_PEER_H_
