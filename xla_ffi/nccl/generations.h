// Tells apart the communicators that XLA puts at one address, one after the other.
#ifndef CGX_NCCL_GENERATIONS_H_
#define CGX_NCCL_GENERATIONS_H_

#include <stdint.h>

#include <string>

#include "nccl/library.h"

namespace cgx {

// Finds the number of the communicator that lies at `comm` now. XLA replaces a communicator on
// every rank, but maybe not with an equal address on every rank, so an address is no answer that
// all ranks agree on. The number changes with the communicator. Returns what went wrong, or "".
std::string generation_of(const NcclLibrary& nccl, NcclComm comm, int64_t* generation);

}  // namespace cgx

#endif  // CGX_NCCL_GENERATIONS_H_
