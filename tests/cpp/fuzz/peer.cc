// The all-reduce over peers' memory: every rank of a group makes the same call.
#include "fuzz/codec.h"
#include "fuzz/communicators.h"
#include "handlers/nccl.h"
#include "warp.h"

namespace fuzz {
namespace {

Call make(Random& random, int64_t world, bool in_host, bool damaged) {
  const Leaves leaves(random, 1, world, 1000, kLongestBucket);
  Call call;
  call.arg(random, XLA_FFI_DataType_U32, {4});
  leaves.add_args(random, &call);
  leaves.add_units(random, &call);
  leaves.add_rets(random, &call);
  if (random.chance(2)) leaves.add_rets(random, &call);
  leaves.add_attributes(&call, "psum_compressed(exchange='peer')");
  call.attributes["in_host"] = int64_t{in_host};
  call.attributes["timeout_ms"] = int64_t{300'000};
  if (damaged) damage(random, &call);
  return call;
}

}  // namespace

void peer_case(Random& random) {
  emulator::set_seed(random.bits());
  const int64_t world = random.chance(64) ? random.within(30, 40) : random.within(1, 3);
  // Other ranks tell of their windows in bytes that are drawn, which name none.
  const bool in_host = random.chance(4);
  const bool damaged = random.chance(2);
  const uint64_t seed = random.bits();
  std::vector<Call> calls;
  for (int64_t r = 0; r < world; ++r) {
    Random same(seed, 0);
    calls.push_back(make(same, world, in_host, damaged));
  }
  const std::pair<XLA_FFI_Handler*, XLA_FFI_ExecutionStage> stages[] = {
      {cgx::nccl_prepare, XLA_FFI_ExecutionStage_PREPARE},
      {cgx::peer_stages().initialize, XLA_FFI_ExecutionStage_INITIALIZE},
      {cgx::peer_stages().execute, XLA_FFI_ExecutionStage_EXECUTE}};
  std::string said;
  for (const auto& [handler, stage] : stages) {
    for (int64_t r = 0; r < world && said.empty(); ++r) {
      said = members(static_cast<int>(world))[r]->run(calls[r], handler, stage);
    }
  }
  count("cgx_all_reduce_peer", !said.empty());
  if (!emulator::run_streams(random.bits())) fail("the streams wait for ever");
  constexpr int64_t kMostRanks = 32;
  if (!damaged && said.empty() != (world <= (in_host ? 1 : kMostRanks))) {
    fail("cgx_all_reduce_peer of " + std::to_string(world) + " ranks: " + said);
  }
}

}  // namespace fuzz
