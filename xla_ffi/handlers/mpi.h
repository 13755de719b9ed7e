// The fused all-reduce over MPI as an XLA FFI handler, and the engine behind it.
#ifndef CGX_HANDLERS_MPI_H_
#define CGX_HANDLERS_MPI_H_

#include <memory>
#include <string>

#include "mpi/engine.h"
#include "xla/ffi/api/c_api.h"

namespace cgx {

XLA_FFI_Error* all_reduce_mpi_handler(XLA_FFI_CallFrame* frame);

// The engine that calls go to; null stops it.
void set_engine(std::unique_ptr<Engine> engine);
// What has made a call fail; empty when nothing has, or there is no engine.
std::string engine_failure();

}  // namespace cgx

#endif  // CGX_HANDLERS_MPI_H_
