// The calls over MPI as XLA FFI handlers, and the engine behind them.
#ifndef CGX_HANDLERS_MPI_H_
#define CGX_HANDLERS_MPI_H_

#include <memory>
#include <string>
#include <vector>

#include "handlers/handlers.h"
#include "messages/engine.h"

namespace cgx {

// cgx_all_reduce_mpi: (keys of both phases, position in the mesh, leaves, units) -> leaves
// [, residuals].
// cgx_gather_sum_mpi: (key, position in the mesh, leaves, units) -> sums [, residuals]. The sum of
// a leaf that has units is fp32 and still in these units.
// cgx_start_{all_reduce,gather_sum}_mpi: (keys, position, ticket, leaves, units) -> ticket. Starts
// such a call with a copy of the operands, and returns. A ticket of 0 becomes a new one. Another is
// kept, so that several calls, by their `number`, share it.
// cgx_finish_{all_reduce,gather_sum}_mpi: (keys, position, ticket, leaves, units) -> what the call
// returns. Waits for the call that was started. If this process knows no such call, as after a
// restart, it makes the call now, with the same result.
// cgx_scatter_mpi: (position in the mesh, u8[world, n]) -> u8[world, n]. Sends row r to rank r, and
// receives row r from rank r.
// cgx_gather_mpi: (position in the mesh, u8[n]) -> u8[world, n], every rank's row.
std::vector<Handler> mpi_handlers();

// Sets the engine that runs the calls; null stops the current engine.
void set_engine(std::unique_ptr<Engine> engine);
// The error that has made a call fail; empty if no call has failed or there is no engine.
std::string engine_failure();

}  // namespace cgx

#endif  // CGX_HANDLERS_MPI_H_
