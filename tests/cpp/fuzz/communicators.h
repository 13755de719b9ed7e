// XLA's collectives extension and NCCL for the fuzzed handlers. All ranks are in this process.
#ifndef CGX_TESTS_FUZZ_COMMUNICATORS_H_
#define CGX_TESTS_FUZZ_COMMUNICATORS_H_

#include <memory>
#include <vector>

#include "fuzz/calls.h"
#include "handlers/collectives_extension.h"
#include "streams.h"

namespace fuzz {

// One rank of a group of `world`, which exists as long as the program runs. It has its own device
// number and one stream.
struct Member {
  emulator::Comm comm;
  int device;
  emulator::Stream* stream;
  XLA_FFI_Collectives_Extension extension = {};

  Member(int rank, int world);
  // Runs a stage of a call. Returns its error, or "".
  std::string run(const Call& call, XLA_FFI_Handler* handler, XLA_FFI_ExecutionStage stage);
};

// The members of the group of that size, which are created once.
std::vector<std::unique_ptr<Member>>& members(int world);

// Seeds the random bytes that NCCL's receives bring.
void set_received(uint64_t seed);

}  // namespace fuzz

#endif  // CGX_TESTS_FUZZ_COMMUNICATORS_H_
