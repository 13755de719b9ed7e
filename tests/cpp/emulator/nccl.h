// A cgx::NcclLibrary whose calls are the emulator's.
#ifndef CGX_EMULATOR_NCCL_H_
#define CGX_EMULATOR_NCCL_H_

#include <functional>

#include "nccl/library.h"
#include "streams.h"

namespace emulator {

inline Comm* comm_of(cgx::NcclComm comm) { return reinterpret_cast<Comm*>(comm); }
inline cgx::NcclComm handle(Comm* comm) { return reinterpret_cast<cgx::NcclComm>(comm); }

// Operators of a communicator are numbers from kOperators on. A new one gets the first free number,
// as in NCCL, so two communicators with one address give the same numbers.
constexpr int kOperators = 100, kInvalidArgument = 4;

// Asked before every call, by its name. If it does not answer 0, the call returns the answer and
// has no effect.
inline std::function<int(const char* call)> intercept = [](const char*) { return 0; };

inline cgx::NcclLibrary nccl() {
  using cgx::NcclComm;
  cgx::NcclLibrary l = {};
  l.get_error_string = [](int) { return "internal error"; };
  l.comm_count = [](NcclComm comm, int* count) {
    *count = comm_of(comm)->world;
    return intercept("ncclCommCount");
  };
  l.comm_user_rank = [](NcclComm comm, int* rank) {
    *rank = comm_of(comm)->rank;
    return intercept("ncclCommUserRank");
  };
  l.comm_get_async_error = [](NcclComm, int* state) {
    *state = cgx::NcclLibrary::kSuccess;
    return intercept("ncclCommGetAsyncError");
  };
  l.group_start = [] {
    const int result = intercept("ncclGroupStart");
    return result == 0 ? group_start() : result;
  };
  l.group_end = [] {
    const int result = intercept("ncclGroupEnd");
    if (result == 0) return group_end();
    drop_group();
    return result;
  };
  l.send = [](const void* data, size_t count, int, int peer, NcclComm comm, cudaStream_t stream) {
    const int result = intercept("ncclSend");
    return result == 0 ? send(data, count, peer, comm_of(comm), stream) : result;
  };
  l.recv = [](void* data, size_t count, int, int peer, NcclComm comm, cudaStream_t stream) {
    const int result = intercept("ncclRecv");
    return result == 0 ? recv(data, count, peer, comm_of(comm), stream) : result;
  };
  l.comm_split = [](NcclComm from, int, int, NcclComm* made, cgx::NcclConfig* config) {
    if (const int result = intercept("ncclCommSplit")) return result;
    Comm* comm = nullptr;
    const bool share = config ? config->split_share != 0 : comm_of(from)->share;
    const bool limited = config && config->max_blocks != cgx::NcclConfig::kUnset;
    const int blocks = limited ? config->max_blocks : comm_of(from)->blocks;
    const int result = split(comm_of(from), share, blocks, &comm);
    *made = handle(comm);
    return result;
  };
  l.op_create = [](int* op, void*, int, int, NcclComm comm) {
    if (const int result = intercept("ncclRedOpCreatePreMulSum")) return result;
    uint64_t& operators = comm_of(comm)->operators;
    int number = 0;
    while (operators >> number & 1) ++number;
    operators |= uint64_t{1} << number;
    *op = kOperators + number;
    return cgx::NcclLibrary::kSuccess;
  };
  l.op_destroy = [](int op, NcclComm comm) {
    if (const int result = intercept("ncclRedOpDestroy")) return result;
    const int number = op - kOperators;
    uint64_t& operators = comm_of(comm)->operators;
    if (number < 0 || number > 63 || !(operators >> number & 1)) return kInvalidArgument;
    operators &= ~(uint64_t{1} << number);
    return cgx::NcclLibrary::kSuccess;
  };
  return l;
}

}  // namespace emulator

#endif  // CGX_EMULATOR_NCCL_H_
