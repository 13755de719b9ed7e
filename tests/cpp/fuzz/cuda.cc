// The handlers for CUDA, on emulated devices: the codec's, and those of codes. No handler can check
// what device memory holds, such as ranks and places.
#include "cuda/codes.h"
#include "cuda/kernels.h"
#include "fuzz/codec.h"
#include "fuzz/codes.h"
#include "handlers/handlers.h"

namespace fuzz {
namespace {

constexpr int64_t kMost = 3000;  // values: emulation is slow
constexpr Codes kCodes{kMost, cgx::kShortestBucket, cgx::kScratchWords};

}  // namespace

void cuda_case(Random& random) {
  static const auto handlers = cgx::cuda_handlers();
  const auto& [target, handler] = handlers[random.below(static_cast<int64_t>(handlers.size()))];
  const std::string name = target + std::string(" (CUDA)");
  const MakeCodec make = codec_maker(target);
  Call call = make ? make(random, kMost, cgx::kTileValues) : code_maker(target)(random, kCodes);
  const bool damaged = random.chance(2);
  if (damaged) damage(random, &call);
  if (!call.args.empty() && random.chance(8))
    call.args[random.below(static_cast<int64_t>(call.args.size()))].allocate(random);
  Frame frame;
  call.fill(&frame);
  XLA_FFI_InvokeContext context;
  const std::string said = frame.call(handler, XLA_FFI_ExecutionStage_EXECUTE, &context);
  count(name.c_str(), !said.empty());
  if (!damaged && !said.empty()) fail(name + " refuses a right call: " + said);
}

}  // namespace fuzz
