// The MPI library that this process has loaded already, bound at run time: nothing is linked, no
// mpi.h is needed, and handles keep the width of the library's own ABI.
#ifndef CGX_MPI_LIBRARY_H_
#define CGX_MPI_LIBRARY_H_

#include <stdint.h>

#include <string>
#include <vector>

#include "messages/port.h"

namespace cgx {

// Values that only the library's own headers know, read from mpi4py.
struct MpiHandles {
  std::string module;  // path of a loaded shared object that links to the library
  int64_t handle_bytes;
  int64_t status_bytes;
  uint64_t communicator;
  uint64_t byte_type;
  uint64_t null_request;
  int64_t error_offset;  // of MPI_ERROR in a status, in bytes
};

// Makes ports on the communicator. Returns null and sets `error` if the library cannot be bound.
PortFactory bind_mpi(const MpiHandles& handles, std::string* error);

// The shared objects of this process that define MPI on their own: more than one cannot work.
std::vector<std::string> loaded_mpi_libraries();

}  // namespace cgx

#endif  // CGX_MPI_LIBRARY_H_
