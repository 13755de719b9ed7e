// The calls over MPI as XLA FFI handlers, and the engine behind them.
#ifndef CGX_HANDLERS_MPI_H_
#define CGX_HANDLERS_MPI_H_

#include <memory>
#include <string>

#include "mpi/engine.h"
#include "xla/ffi/api/c_api.h"

namespace cgx {

// (keys of both phases, position in the mesh, leaves, units) -> leaves [, residuals]
XLA_FFI_Error* all_reduce_mpi_handler(XLA_FFI_CallFrame* frame);
// (key, position in the mesh, leaves, units) -> sums, which are fp32 and still in their units where
// a leaf has any [, residuals]
XLA_FFI_Error* gather_sum_mpi_handler(XLA_FFI_CallFrame* frame);
// (position in the mesh, u8[world, n]) -> u8[world, n]: row r to rank r, and row r from it
XLA_FFI_Error* scatter_mpi_handler(XLA_FFI_CallFrame* frame);
// (position in the mesh, u8[n]) -> u8[world, n]: every rank's row
XLA_FFI_Error* gather_mpi_handler(XLA_FFI_CallFrame* frame);

// The engine that calls go to; null stops it.
void set_engine(std::unique_ptr<Engine> engine);
// What has made a call fail; empty when nothing has, or there is no engine.
std::string engine_failure();

}  // namespace cgx

#endif  // CGX_HANDLERS_MPI_H_
