// The calls over MPI as XLA FFI handlers, and the engine behind them.
#ifndef CGX_HANDLERS_MPI_H_
#define CGX_HANDLERS_MPI_H_

#include <memory>
#include <string>

#include "messages/engine.h"
#include "xla/ffi/api/c_api.h"

namespace cgx {

// (keys of both phases, position in the mesh, leaves, units) -> leaves [, residuals]
XLA_FFI_Error* all_reduce_mpi_handler(XLA_FFI_CallFrame* frame);
// (key, position in the mesh, leaves, units) -> sums [, residuals]. The sum of a leaf that has
// units is fp32 and still in these units.
XLA_FFI_Error* gather_sum_mpi_handler(XLA_FFI_CallFrame* frame);
// (position in the mesh, u8[world, n]) -> u8[world, n]: sends row r to rank r, and receives row r
// from rank r
XLA_FFI_Error* scatter_mpi_handler(XLA_FFI_CallFrame* frame);
// (position in the mesh, u8[n]) -> u8[world, n]: every rank's row
XLA_FFI_Error* gather_mpi_handler(XLA_FFI_CallFrame* frame);

// Sets the engine that runs the calls; null stops the current engine.
void set_engine(std::unique_ptr<Engine> engine);
// The error that has made a call fail; empty if no call has failed or there is no engine.
std::string engine_failure();

}  // namespace cgx

#endif  // CGX_HANDLERS_MPI_H_
