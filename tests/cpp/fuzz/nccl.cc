// The fused calls on NCCL of one rank, on emulated streams. The rank receives random bytes.
#include "handlers/nccl.h"

#include "fuzz/codec.h"
#include "fuzz/communicators.h"
#include "nccl/fused.h"
#include "warp.h"

namespace fuzz {
namespace {

struct Handler {
  const char* name;
  cgx::Collective collective;
};
const Handler kHandlers[] = {
    {"cgx_all_reduce_nccl", cgx::Collective::kAllReduce},
    {"cgx_reduce_scatter_nccl", cgx::Collective::kReduceScatter},
    {"cgx_all_gather_nccl", cgx::Collective::kAllGather},
    {"cgx_gather_sum_nccl", cgx::Collective::kGatherSum},
};

Call make(Random& random, cgx::Collective collective, int64_t world) {
  const bool whole = collective == cgx::Collective::kAllReduce;
  const int64_t in = collective == cgx::Collective::kReduceScatter ? world : 1;
  const int64_t out = collective == cgx::Collective::kAllGather ? world : 1;
  Leaves leaves(random, 1, world, 2000, whole ? cgx::kTileValues : 0);
  leaves.build(whole ? 1 : world);
  Call call;
  call.arg(random, XLA_FFI_DataType_U32, {whole ? 4 : 2 * in});
  leaves.add_args(random, &call, in);
  leaves.add_units(random, &call);
  leaves.add_rets(random, &call, out);
  const bool sums = whole || collective == cgx::Collective::kGatherSum;
  if (sums && random.chance(2)) leaves.add_rets(random, &call);
  const int64_t segment = random.of<int64_t>({64, 500, 1 << 20});
  call.ret(random, XLA_FFI_DataType_U8,
           {cgx::CudaFused::scratch_bytes(collective, leaves.owned.view(), segment)});
  leaves.add_attributes(&call, "psum_compressed(exchange='nccl')");
  call.attributes["segment_bytes"] = segment;
  call.attributes["streams"] = random.of<int64_t>({1, 1, 2, 3, 8});
  return call;
}

}  // namespace

void nccl_case(Random& random) {
  emulator::set_seed(random.bits());
  const int64_t world = random.within(1, 4);
  Member& member = *members(static_cast<int>(world))[random.below(world)];
  const Handler& handler = kHandlers[random.below(4)];
  Call call = make(random, handler.collective, world);
  const bool damaged = random.chance(2);
  if (damaged) damage(random, &call);
  set_received(random.bits());
  std::string said = member.run(call, cgx::nccl_prepare, XLA_FFI_ExecutionStage_PREPARE);
  const cgx::Stages stages = cgx::nccl_stages(handler.collective);
  if (said.empty() && !random.chance(64)) {
    said = member.run(call, stages.initialize, XLA_FFI_ExecutionStage_INITIALIZE);
  }
  if (said.empty()) said = member.run(call, stages.execute, XLA_FFI_ExecutionStage_EXECUTE);
  const bool early = said.find("the stage Initialize") != said.npos;
  count(handler.name, !said.empty());
  if (!emulator::run_streams(random.bits())) fail("the streams wait for ever");
  if (!damaged && !said.empty() && !early) {
    fail(std::string(handler.name) + " refuses a right call: " + said);
  }
}

}  // namespace fuzz
