// A cgx::NcclLibrary whose calls are the emulator's.
#ifndef CGX_EMULATOR_NCCL_H_
#define CGX_EMULATOR_NCCL_H_

#include "nccl/library.h"
#include "streams.h"

namespace emulator {

inline Comm* comm_of(cgx::NcclComm comm) { return reinterpret_cast<Comm*>(comm); }
inline cgx::NcclComm handle(Comm* comm) { return reinterpret_cast<cgx::NcclComm>(comm); }

// Operators of a communicator are numbers from kOperators on. A new one gets the first free number,
// as in NCCL, so two communicators with one address give the same numbers.
constexpr int kOperators = 100, kInvalidArgument = 4;

inline cgx::NcclLibrary nccl() {
  using cgx::NcclComm;
  cgx::NcclLibrary l = {};
  l.get_error_string = [](int) { return "internal error"; };
  l.comm_count = [](NcclComm comm, int* count) {
    *count = comm_of(comm)->world;
    return cgx::NcclLibrary::kSuccess;
  };
  l.comm_user_rank = [](NcclComm comm, int* rank) {
    *rank = comm_of(comm)->rank;
    return cgx::NcclLibrary::kSuccess;
  };
  l.comm_get_async_error = [](NcclComm, int* state) {
    *state = cgx::NcclLibrary::kSuccess;
    return cgx::NcclLibrary::kSuccess;
  };
  l.group_start = group_start;
  l.group_end = group_end;
  l.send = [](const void* data, size_t count, int, int peer, NcclComm comm, cudaStream_t stream) {
    return send(data, count, peer, comm_of(comm), stream);
  };
  l.recv = [](void* data, size_t count, int, int peer, NcclComm comm, cudaStream_t stream) {
    return recv(data, count, peer, comm_of(comm), stream);
  };
  l.comm_split = [](NcclComm from, int, int, NcclComm* made, cgx::NcclConfig* config) {
    Comm* comm = nullptr;
    const bool share = config ? config->split_share != 0 : comm_of(from)->share;
    const bool limited = config && config->max_blocks != cgx::NcclConfig::kUnset;
    const int blocks = limited ? config->max_blocks : comm_of(from)->blocks;
    const int result = split(comm_of(from), share, blocks, &comm);
    *made = handle(comm);
    return result;
  };
  l.op_create = [](int* op, void*, int, int, NcclComm comm) {
    uint64_t& operators = comm_of(comm)->operators;
    int number = 0;
    while (operators >> number & 1) ++number;
    operators |= uint64_t{1} << number;
    *op = kOperators + number;
    return cgx::NcclLibrary::kSuccess;
  };
  l.op_destroy = [](int op, NcclComm comm) {
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
