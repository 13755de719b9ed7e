// XLA's collectives extension and NCCL for the fuzzed handlers: ranks of this process.
#ifndef CGX_TESTS_FUZZ_COMMUNICATORS_H_
#define CGX_TESTS_FUZZ_COMMUNICATORS_H_

#include <memory>
#include <vector>

#include "fuzz/calls.h"
#include "streams.h"
#include "xla/ffi/api/collectives_c_api.h"

namespace fuzz {

// One rank of a group of `world`, for as long as the program runs: its device has a number of its
// own, and one stream.
struct Member {
  emulator::Comm comm;
  int device;
  emulator::Stream* stream;
  XLA_FFI_Collectives_Extension extension = {};

  Member(int rank, int world);
  // What a stage of a call says is wrong; "" when nothing is.
  std::string run(const Call& call, XLA_FFI_Handler* handler, XLA_FFI_ExecutionStage stage);
};

// The members of the group of that size; made once.
std::vector<std::unique_ptr<Member>>& members(int world);

// NCCL's receives bring any bytes, which follow from this number.
void set_received(uint64_t seed);

}  // namespace fuzz

#endif  // CGX_TESTS_FUZZ_COMMUNICATORS_H_
