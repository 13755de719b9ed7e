// The handlers for CUDA, on emulated devices: the codec's, and those of codes. No handler can check
// what device memory holds, such as ranks and places.
#include "handlers/cuda.h"

#include "cuda/codes.h"
#include "fuzz/codec.h"
#include "fuzz/codes.h"
#include "handlers/code_calls.h"

namespace fuzz {
namespace {

constexpr int64_t kMost = 3000;  // values: emulation is slow
constexpr Codes kCodes{kMost, cgx::kShortestBucket, cgx::kScratchWords};

}  // namespace

void cuda_case(Random& random) {
  static const auto codes = cgx::cuda_code_handlers();
  const struct {
    const char* name;
    XLA_FFI_Handler* call;
    Call (*make)(Random& random, int64_t most, bool units);
  } codec[] = {{"cgx_encode (CUDA)", cgx::encode_cuda_handler, encode_call},
               {"cgx_reduce (CUDA)", cgx::reduce_cuda_handler, reduce_call},
               {"cgx_decode (CUDA)", cgx::decode_cuda_handler, decode_call},
               {"cgx_accumulate (CUDA)", cgx::accumulate_cuda_handler, accumulate_call}};
  const int64_t kind = random.below(4 + static_cast<int64_t>(codes.size()));
  const std::string name =
      kind < 4 ? codec[kind].name : codes[kind - 4].target + std::string(" (CUDA)");
  Call call = kind < 4 ? codec[kind].make(random, kMost, false)
                       : code_maker(codes[kind - 4].target)(random, kCodes);
  const bool damaged = random.chance(2);
  if (damaged) damage(random, &call);
  if (!call.args.empty() && random.chance(8))
    call.args[random.below(static_cast<int64_t>(call.args.size()))].allocate(random);
  Frame frame;
  call.fill(&frame);
  XLA_FFI_InvokeContext context;
  const std::string said = frame.call(kind < 4 ? codec[kind].call : codes[kind - 4].call,
                                      XLA_FFI_ExecutionStage_EXECUTE, &context);
  count(name.c_str(), !said.empty());
  if (!damaged && !said.empty()) fail(name + " refuses a right call: " + said);
}

}  // namespace fuzz
