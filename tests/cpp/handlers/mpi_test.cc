// The attributes of calls over MPI that say which ranks take part. Calls that the engine cannot do
// are refused before they start. A call that is started gives what it gives at once, however often
// it is finished, and also where nobody started it.
#include "handlers/mpi.h"

#include <atomic>
#include <utility>
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
    {{0}, 1, kLargestTag / cgx::kCallTags / 2 - 1, ""},
    {{0, 3}, 2, 0, "gather: groups hold position 3, must be in [0, 3)"},
    {{0, -1}, 2, 0, "gather: groups hold position -1, must be in [0, 3)"},
    {{0, int64_t{1} << 32}, 2, 0, "gather: groups hold position 4294967296, must be in [0, 3)"},
    {{1, 2}, 2, 0, "gather: position 0 is in no group"},
    {{0, 1, 2}, 2, 0, "gather: size of groups is 3, must be a positive multiple of world, 2"},
    {{0}, 1, -1, "gather: channel is -1, must be in [0, 50)"},
    {{0}, 1, 50, "gather: channel is 50, must be in [0, 50)"},
    {{0}, 1, int64_t{1} << 62, "gather: channel is 4611686018427387904, must be in [0, 50)"},
    {{0}, 0, 0, "gather: world is 0, must be in [1, 2^20]"},
};

constexpr int64_t kRows = 100, kColumns = 50, kSize = kRows * kColumns;
int64_t runs = 0;

std::string call(Frame& frame, const std::string& target) {
  XLA_FFI_InvokeContext context;
  context.run = ++runs;
  return execute(cgx::mpi_handlers(), target, frame, context);
}

// Either way, a row's unit is 1/2 and a column's 2.
std::vector<float> some_units() {
  std::vector<float> units(2 * (kRows + kColumns), 2.0f);
  for (int64_t i = 0; i < kRows; ++i) units[i] = units[kRows + kColumns + i] = 0.5f;
  return units;
}

// The operands that a call, its start and its finish have in common. A second leaf has units.
struct Sum {
  const int64_t leaves;
  const uint32_t keys[4] = {1, 2, 3, 4};
  const int32_t position = 0;
  std::vector<float> in = std::vector<float>(kSize, 0.5f);
  const std::vector<float> units = some_units();

  Frame frame(const uint32_t* ticket, int64_t channel = 1) const {
    Frame frame;
    frame.arg(XLA_FFI_DataType_U32, keys, {2, 2}).arg(XLA_FFI_DataType_S32, &position, {1});
    if (ticket) frame.arg(XLA_FFI_DataType_U32, ticket, {2}).attr("number", int64_t{0});
    std::vector<int64_t> slots;
    for (int64_t k = 0; k < leaves; ++k) {
      frame.arg(XLA_FFI_DataType_F32, in.data(), {kSize});
      for (const int64_t number : {int64_t{4}, int64_t{512}, int64_t{0}, k, int64_t{0}, int64_t{0},
                                   k * kColumns, int64_t{0}, k * kRows}) {
        slots.push_back(number);
      }
    }
    if (leaves > 1) frame.arg(XLA_FFI_DataType_F32, units.data(), {2, kRows + kColumns});
    frame.attr("slots", slots)
        .attr("world", int64_t{1})
        .attr("divisor", 2.0f)
        .attr("groups", std::vector<int64_t>{0})
        .attr("channel", channel)
        .attr("name", "pmean")
        .attr("program", "jit_step");
    return frame;
  }
  std::string start(const uint32_t* ticket, uint32_t* out, bool residuals) const {
    return call(
        frame(ticket).ret(XLA_FFI_DataType_U32, out, {2}).attr("residuals", int64_t{residuals}),
        "cgx_start_all_reduce_mpi");
  }
  // Returns the sum and the residual of a call at once, or of the one of a ticket.
  std::vector<float> result(const uint32_t* ticket, bool residuals) const {
    std::vector<float> out(leaves * (residuals ? 2 : 1) * kSize);
    Frame own = frame(ticket);
    for (size_t at = 0; at < out.size(); at += kSize) {
      own.ret(XLA_FFI_DataType_F32, out.data() + at, {kSize});
    }
    const std::string said = call(own, ticket ? "cgx_finish_all_reduce_mpi" : "cgx_all_reduce_mpi");
    check(said.empty(), "a call fails: " + said);
    return out;
  }
};

void started(int64_t leaves) {
  const uint32_t none[2] = {0, 0}, unknown[2] = {1, 1};
  for (const bool residuals : {false, true}) {
    Sum sum{leaves};
    for (int64_t i = 0; i < kSize; ++i) sum.in[i] = static_cast<float>(i % 97) - 40;
    const auto want = sum.result(nullptr, residuals);
    check(sum.result(none, residuals) == want, "a call that nobody started is made");
    check(sum.result(unknown, residuals) == want, "a call that this process lost is made");
    uint32_t first[2], again[2], shared[2];
    check(sum.start(none, first, residuals).empty(), "a call starts");
    const auto in = sum.in;
    std::fill(sum.in.begin(), sum.in.end(), 7.0f);  // a program's memory is its own
    check(sum.result(first, residuals) == want, "a call that was started is finished");
    check(sum.result(first, residuals) == want, "it is finished again");
    sum.in = in;
    check(sum.start(none, again, residuals).empty(), "a call starts again");
    check(first[1] != again[1], "tickets differ");
    check(sum.start(first, shared, residuals).empty(), "a call starts with a ticket");
    check(shared[0] == first[0] && shared[1] == first[1], "a ticket is shared");
    check(sum.result(again, residuals) == want, "a call that was replaced is made");
    float less[3];
    Frame wrong = sum.frame(shared);
    for (int64_t k = 0; k < leaves * (residuals ? 2 : 1); ++k) {
      wrong.ret(XLA_FFI_DataType_F32, less, {3});
    }
    check(call(wrong, "cgx_finish_all_reduce_mpi") ==
              "pmean: bytes of result 0 is 12, expected 20000",
          "results of another size are refused");
  }
}

// Counts the receives of notices that wait.
class CountedPort : public SilentPort {
 public:
  static inline std::atomic<int> waiting{0}, most{0};
  std::string receive(int64_t, int, void*, int64_t, int64_t) override {
    ++own_;
    most = std::max<int>(most, ++waiting);
    return "";
  }
  void cancel() override { waiting -= std::exchange(own_, 0); }

 private:
  int own_ = 0;
};

cgx::EngineSettings settings() { return {kRanks, 0, kLargestTag, {64, 2}, 60, 1}; }

// A notice for the next engine must not meet a receive of the one before it.
void engines_hear_one_after_the_other() {
  for (int i = 0; i < 3; ++i) {
    cgx::set_engine(std::make_unique<cgx::Engine>(port_of<CountedPort>, settings()));
    check(CountedPort::waiting == kRanks - 1, "an engine listens to every other rank");
  }
  cgx::set_engine(nullptr);
  check(CountedPort::waiting == 0 && CountedPort::most == kRanks - 1, "one engine at a time");
}

}  // namespace

int main() {
  engines_hear_one_after_the_other();
  cgx::set_engine(std::make_unique<cgx::Engine>(port_of<SilentPort>, settings()));
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
    const std::string said = call(frame, "cgx_gather_mpi");
    check(said == c.says, std::string("expected '") + c.says + "', got '" + said + "'");
  }
  for (const int64_t leaves : {1, 2}) started(leaves);
  cgx::set_engine(nullptr);
  return report();
}
