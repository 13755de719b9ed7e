#include "nccl/generations.h"

#include <map>
#include <mutex>

namespace cgx {
namespace {

struct Marked {
  int mark = 0;
  int64_t generation = 0;
};

}  // namespace

// A mark is an operator, which goes with its communicator. NCCL cannot look one up, so this
// destroys the mark and creates it again. A new communicator gives its first operator the old
// number. So no two marks may be on one communicator: destroying one would find the other.
std::string generation_of(const NcclLibrary& nccl, NcclComm comm, int64_t* generation) {
  static std::mutex mutex;
  static auto* const all = new std::map<NcclComm, Marked>;  // outlives static destructors
  const std::lock_guard<std::mutex> lock(mutex);
  Marked& own = (*all)[comm];
  if (own.generation == 0 || nccl.op_destroy(own.mark, comm) != NcclLibrary::kSuccess) {
    ++own.generation;
  }
  *generation = own.generation;
  uint8_t one = 1;
  const int result =
      nccl.op_create(&own.mark, &one, NcclLibrary::kBytes, NcclLibrary::kHostScalar, comm);
  return nccl.said("ncclRedOpCreatePreMulSum", result);
}

}  // namespace cgx
