// The attributes of calls over MPI that say which ranks take part. Calls that the engine cannot do
// are refused before they start.
#include "handlers/mpi.h"

#include <vector>

#include "cases.h"
#include "handlers/frames.h"
#include "messages/network.h"

namespace {

constexpr int64_t kRanks = 3, kLargestTag = 300;

struct Case {
  std::vector<int64_t> groups;
  int64_t world, channel;
  const char* says;
};
const Case kCases[] = {
    {{0}, 1, 0, ""},
    {{0}, 1, kLargestTag / cgx::kCallTags - 1, ""},
    {{0, 3}, 2, 0, "gather: groups hold position 3, must be in [0, 3)"},
    {{0, -1}, 2, 0, "gather: groups hold position -1, must be in [0, 3)"},
    {{0, int64_t{1} << 32}, 2, 0, "gather: groups hold position 4294967296, must be in [0, 3)"},
    {{1, 2}, 2, 0, "gather: position 0 is in no group"},
    {{0, 1, 2}, 2, 0, "gather: size of groups is 3, must be a positive multiple of world, 2"},
    {{0}, 1, -1, "gather: channel is -1, must be in [0, 100)"},
    {{0}, 1, 100, "gather: channel is 100, must be in [0, 100)"},
    {{0}, 1, int64_t{1} << 62, "gather: channel is 4611686018427387904, must be in [0, 100)"},
    {{0}, 0, 0, "gather: world is 0, must be in [1, 2^20]"},
};

}  // namespace

int main() {
  cgx::set_engine(
      std::make_unique<cgx::Engine>(std::make_unique<SilentPorts>(),
                                    cgx::EngineSettings{kRanks, 0, kLargestTag, {64, 2}, 60, 1}));
  int64_t run = 0;
  for (const Case& c : kCases) {
    const int32_t position = 0;
    const std::vector<uint8_t> in(10, 1);
    std::vector<uint8_t> out(10 * std::max<int64_t>(c.world, 1));
    Frame frame;
    frame.arg(XLA_FFI_DataType_S32, &position, {1})
        .arg(XLA_FFI_DataType_U8, in.data(), {10})
        .ret(XLA_FFI_DataType_U8, out.data(), {static_cast<int64_t>(out.size())})
        .attr("world", c.world)
        .attr("groups", c.groups)
        .attr("channel", c.channel)
        .attr("name", "gather")
        .attr("program", "jit_step");
    XLA_FFI_InvokeContext context;
    context.run = ++run;
    const std::string said = frame.call(handler_of(cgx::mpi_handlers(), "cgx_gather_mpi"),
                                        XLA_FFI_ExecutionStage_EXECUTE, &context);
    check(said == c.says, std::string("expected '") + c.says + "', got '" + said + "'");
  }
  cgx::set_engine(nullptr);
  return report();
}
