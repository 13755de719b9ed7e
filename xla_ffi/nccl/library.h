// NCCL, bound at run time to the copy that XLA has loaded: nothing links to it, and building needs
// no header of its. What is used has had this binary interface since NCCL 2.7.
#ifndef CGX_NCCL_LIBRARY_H_
#define CGX_NCCL_LIBRARY_H_

#include <cuda_runtime_api.h>
#include <stddef.h>

#include <string>

namespace cgx {

using NcclComm = struct ncclComm*;

struct NcclLibrary {
  static constexpr int kSuccess = 0, kInProgress = 7;  // of ncclResult_t
  static constexpr int kBytes = 1;                     // ncclUint8

  int (*get_version)(int* version);
  const char* (*get_error_string)(int result);
  int (*comm_count)(NcclComm comm, int* count);
  int (*comm_user_rank)(NcclComm comm, int* rank);
  int (*comm_get_async_error)(NcclComm comm, int* result);
  int (*group_start)();
  int (*group_end)();
  int (*send)(const void* data, size_t count, int type, int peer, NcclComm comm,
              cudaStream_t stream);
  int (*recv)(void* data, size_t count, int type, int peer, NcclComm comm, cudaStream_t stream);
};

// The library of this process, or null and what is wrong.
const NcclLibrary* nccl_library(std::string* error);

}  // namespace cgx

#endif  // CGX_NCCL_LIBRARY_H_
