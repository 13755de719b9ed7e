// The handlers of the fused calls on CUDA, driven by handmade call frames like those that XLA
// makes. Everything below the handlers is emulated. Needs the FFI headers of a jaxlib with the
// collectives extension.
#include "handlers/nccl.h"

#include <cmath>
#include <utility>

#include "cases.h"
#include "cpu/kernels.h"
#include "handlers/collectives_extension.h"
#include "nccl.h"
#include "nccl/fused.h"

namespace {

using Bytes = std::vector<uint8_t>;

constexpr int64_t kWorld = 2, kValues = 1000, kBits = 4, kBucket = 64, kRotation = 1,
                  kSlotSegment = 7;
constexpr int64_t kNearest = 0;
constexpr int kSuccess = cgx::NcclLibrary::kSuccess;

emulator::Comm comms[kWorld];
int comm_state;

// How NCCL fails.
struct Failure {
  bool blocks = true;  // false: a call for all ranks is in progress until its result is asked for
  bool later = false;  // calls succeed, and a communicator that is asked reports the failure
  int result = kSuccess;  // of every call that fails
  int64_t from = -1;      // the first call that fails, like all after it; -1: none
};

// The emulated NCCL of one case.
struct Nccl {
  Failure failure;
  int64_t calls = 0;
  const char* pending = nullptr;  // a call that is in progress
  std::string failed;             // the first call that has failed
} nccl;

// The result of a call. `asks` is for a call that asks for a communicator's state.
int result_of(const char* call, bool asks = false) {
  const Failure& failure = nccl.failure;
  if (failure.from < 0 || (failure.later && !asks)) return kSuccess;
  if (nccl.calls++ < failure.from) return kSuccess;
  if (nccl.failed.empty()) nccl.failed = call;
  return failure.result;
}

// The result of a call for all ranks whose outcome is `result`.
int in_progress(const char* call, int result) {
  if (nccl.failure.blocks || result != kSuccess) return result;
  nccl.pending = call;
  return cgx::NcclLibrary::kInProgress;
}

const char* error_string(int result) {
  if (result == 4) return "invalid argument";
  if (result == 5) return "invalid usage";
  if (result == 6) return "remote process exited or there was a network error";
  return "internal error";
}

std::vector<std::string> requests;

XLA_FFI_Error* request(const XLA_FFI_Collectives_Extension*,
                       XLA_FFI_Communicator_Request_Args* args) {
  std::string text =
      std::to_string(args->group_mode) + "/" + std::to_string(args->communication_id);
  for (size_t g = 0; g < args->num_groups; ++g) {
    text += ":";
    for (size_t i = 0; i < args->groups[g].size; ++i) {
      text += " " + std::to_string(args->groups[g].ids[i]);
    }
  }
  requests.push_back(text);
  return nullptr;
}

// A fused call, and the sizes of its operands and results.
struct Fused {
  const char* name;
  cgx::Collective collective;
  int64_t keys, rows_in, rows_out;
  bool residual = false;
  int64_t more_payloads = 0;  // bytes beyond those needed
};
const Fused kFused[] = {
    {"all-reduce", cgx::Collective::kAllReduce, 4, 1, 1},
    {"reduce-scatter", cgx::Collective::kReduceScatter, 2 * kWorld, kWorld, 1},
    {"all-gather", cgx::Collective::kAllGather, 2, 1, kWorld},
    {"all-reduce with residuals", cgx::Collective::kAllReduce, 4, 1, 1, true},
    {"gather-sum", cgx::Collective::kGatherSum, 2, 1, 1},
    {"gather-sum with residuals", cgx::Collective::kGatherSum, 2, 1, 1, true},
};

constexpr int64_t kSegment = 100;

// The bytes that the call's payloads need.
int64_t payload_bytes(const Fused& call) {
  const cgx::SlotSpec leaf{kValues, kBits, kBucket, kNearest, 0, kRotation, kSlotSegment};
  const bool whole = call.collective == cgx::Collective::kAllReduce;
  cgx::OwnedLayout owned;
  check(owned.build(std::vector<cgx::SlotSpec>(whole ? 1 : kWorld, leaf), kWorld).empty(),
        "fused: layout");
  return cgx::CudaFused::scratch_bytes(call.collective, owned.view(), kSegment);
}

struct Options {
  int32_t major = 0, minor = 2;
  bool extension = true, clique = true, initialize = true;
  int count = kWorld, state = cgx::NcclLibrary::kSuccess;
  int64_t failing = -1;
  int64_t world = kWorld;
  std::vector<int64_t> groups = {0, 1, 2, 3};
  int64_t streams = 1;
  Failure failure = {};
  int executing = kWorld;     // ranks that reach Execute; the others are lost before it
  bool aborts = false;        // XLA aborts its communicator afterwards
  int64_t failing_cuda = -1;  // the number of a CUDA call that fails
  int64_t units = 0, bucket = kBucket;
  bool slots = true;
  float divisor = 1;
};

// The units of the leaf: 20 rows by 50 columns, with the columns first.
struct Factors {
  static constexpr int64_t kRows = 20, kColumns = 50, kCount = kRows + kColumns;
  std::vector<float> numbers = std::vector<float>(2 * kCount);

  Factors() {
    for (int64_t i = 0; i < kCount; ++i) {
      numbers[kCount + i] = 1 + static_cast<float>(i % kColumns) / 7;
      numbers[i] = 1 / numbers[kCount + i];
    }
  }
  cgx::LeafUnits view() const {
    return {numbers.data() + kColumns, numbers.data(), kColumns, kCount};
  }
};
const Factors factors;

// A new device for every rank, because what a device keeps from call to call belongs to its
// streams.
struct Devices {
  int number[kWorld];
  cudaStream_t stream[kWorld];

  Devices() {
    emulator::reset();
    static int last = 0;
    for (int r = 0; r < kWorld; ++r) {
      emulator::set_device(number[r] = ++last);
      stream[r] = emulator::create_stream();
    }
    emulator::set_device(0);  // none that a call runs on
  }
};

using Arrays = std::vector<std::vector<float>>;  // by rank

const char* const kWaiting = "the streams wait for ever";

// Every rank's operand: `rows` of kValues.
Arrays operands(int64_t rows) {
  std::mt19937 rng(1);
  std::normal_distribution<float> normal;
  Arrays all(kWorld, std::vector<float>(rows * kValues));
  for (auto& rank : all) {
    for (float& v : rank) v = normal(rng);
    for (size_t i = 0; i < rank.size(); ++i) {
      if (i / 30 % 3 == 0) rank[i] = 0;
    }
  }
  return all;
}

// Runs both ranks' calls on new communicators, stage by stage. Returns the first error.
std::string fused(const Fused& call, const Options& options, Arrays* out,
                  const Devices& devices = Devices()) {
  emulator::fail_at(options.failing);
  emulator::fail_cuda_at(options.failing_cuda);
  nccl = Nccl();
  nccl.failure = options.failure;
  static int64_t communicator = 0;  // negative: no communicator that is split has such a number
  --communicator;
  requests.clear();
  comm_state = options.state;
  const Arrays in = operands(call.rows_in);
  out->assign(kWorld, std::vector<float>(call.rows_out * kValues, NAN));
  const uint32_t keys[4] = {1, 2, 3, 4};
  // Aligned as XLA's buffers are; they live until the streams have run.
  struct alignas(256) Line {
    uint8_t bytes[256];
  };
  const int64_t bytes = payload_bytes(call) + call.more_payloads;
  std::vector<std::vector<Line>> payloads(kWorld, std::vector<Line>(bytes / sizeof(Line) + 1));
  Arrays lost = *out;
  XLA_FFI_Collectives_Extension extensions[kWorld] = {};
  XLA_FFI_InvokeContext contexts[kWorld];
  std::vector<Frame> frames(kWorld);
  for (int r = 0; r < kWorld; ++r) {
    comms[r] = {r, options.count, communicator, communicator};
    extensions[r] = collectives(nullptr, options.major, options.minor);
    extensions[r].request_communicator = request;
    contexts[r].device = devices.number[r];
    contexts[r].stream = devices.stream[r];
    if (options.extension) contexts[r].extension = &extensions[r].extension_base;
    Frame& frame = frames[r];
    frame.arg(XLA_FFI_DataType_U32, keys, {call.keys})
        .arg(XLA_FFI_DataType_F32, in[r].data(), {call.rows_in, kValues});
    if (options.units) {
      frame.arg(XLA_FFI_DataType_F32, factors.numbers.data(), {2, Factors::kCount});
    }
    frame.ret(XLA_FFI_DataType_F32, (*out)[r].data(), {call.rows_out, kValues});
    if (call.residual) frame.ret(XLA_FFI_DataType_F32, lost[r].data(), {kValues});
    frame.ret(XLA_FFI_DataType_U8, payloads[r].data(), {bytes})
        .attr("divisor", options.divisor)
        .attr("groups", options.groups)
        .attr("segment_bytes", kSegment)
        .attr("streams", options.streams)
        .attr("name", "psum_compressed(exchange='nccl') over axis 'data'");
    std::vector<int64_t> slots = {kBits, options.bucket, kNearest, 0, kRotation, kSlotSegment};
    for (const int64_t place : {Factors::kColumns, Factors::kColumns, int64_t{0}}) {
      slots.push_back(options.units ? place : 0);
    }
    if (!options.slots) slots.clear();
    frame.attr("slots", slots).attr("world", options.world);
  }
  std::string error;
  const auto stage = [&](XLA_FFI_Handler* handler, XLA_FFI_ExecutionStage number,
                         int ranks = kWorld) {
    for (int r = 0; r < ranks; ++r) {
      const std::string said = frames[r].call(handler, number, &contexts[r]);
      if (error.empty()) error = said;
    }
  };
  stage(cgx::nccl_prepare, XLA_FFI_ExecutionStage_PREPARE);
  for (int r = 0; r < kWorld && options.clique; ++r) {
    extensions[r].state = reinterpret_cast<XLA_FFI_CollectivesState*>(&comms[r]);
  }
  const cgx::Stages stages = cgx::nccl_stages(call.collective);
  if (options.initialize) stage(stages.initialize, XLA_FFI_ExecutionStage_INITIALIZE);
  const int64_t made = emulator::made();
  emulator::forget_used();
  stage(stages.execute, XLA_FFI_ExecutionStage_EXECUTE, options.executing);
  emulator::fail_cuda_at(-1);
  check(!emulator::in_group(), "no group stays open");
  if (error.empty() && emulator::made() > made) error = "something was made between messages";
  if (emulator::device() != 0) error += "another device is left current";
  for (int r = 0; r < kWorld && options.aborts; ++r) emulator::abort_messages(comms[r]);
  // The caller frees the memory of a failed call once its stream has got that far.
  if ((error.empty() || options.aborts) && !emulator::run_streams(3)) error += kWaiting;
  for (const auto& rank : lost) {
    for (size_t i = 0; call.residual && error.empty() && !options.aborts && i < rank.size(); ++i) {
      if (std::isnan(rank[i])) error = "a residual is left out";
    }
  }
  return error;
}

// What receivers make of rows of values, each encoded by itself: their sum, or if not `sums`, the
// decoded row. A record with a mask is rotated once more before it is added.
std::vector<float> received(const std::vector<const float*>& rows, bool sums = true,
                            const cgx::LeafUnits* units = nullptr) {
  cgx::OwnedLayout owned;
  check(owned.build({{kValues, kBits, kBucket, kNearest, 0, kRotation, kSlotSegment}}, 1).empty(),
        "fused: layout");
  const cgx::Layout layout = owned.view();
  const cgx::DType dtype = cgx::DType::kF32;
  const uint32_t key[2] = {0, 0};
  const std::vector<float> zeros(kValues);
  std::vector<float> out(kValues), scratch(owned.scratch_values());
  Bytes payloads(rows.size() * layout.chunk_bytes);
  const cgx::KernelTable& cpu = cgx::current_kernels();
  for (size_t r = 0; r < rows.size(); ++r) {
    const void* from = rows[r];
    uint8_t* const payload = payloads.data() + r * layout.chunk_bytes;
    cpu.encode({layout, {&from, &dtype}, {}, key, -1, payload, scratch.data(), units}, 0,
               layout.total_bytes());
  }
  const void* from = zeros.data();
  void* to = out.data();
  const auto count = static_cast<int64_t>(rows.size());
  if (sums) {
    cpu.accumulate(
        {layout, {&from, &dtype}, payloads.data(), count, -1, 1.0f, {&to, &dtype}, scratch.data()},
        0, layout.total_bytes());
  } else {
    cpu.decode({layout, payloads.data(), {&to, &dtype}, scratch.data()}, 0, layout.total_bytes());
  }
  return out;
}

void other_collectives() {
  Arrays in = operands(kWorld), out, expected(kWorld);
  check(fused(kFused[1], {}, &out).empty(), "fused: reduce-scatter");
  for (int64_t r = 0; r < kWorld; ++r) {
    expected[r] = received({&in[1 - r][r * kValues]});
    for (int64_t i = 0; i < kValues; ++i) expected[r][i] += in[r][r * kValues + i];
  }
  check(out == expected, "fused: sums of exact and received values");

  in = operands(1);
  check(fused(kFused[2], {}, &out).empty(), "fused: all-gather");
  for (int64_t r = 0; r < kWorld; ++r) {
    const std::vector<float> row = received({in[r].data()}, /*sums=*/false);
    for (auto& rank : expected) {
      if (r == 0) rank.clear();
      rank.insert(rank.end(), row.begin(), row.end());
    }
  }
  check(out == expected, "fused: every rank has received every row, its own too");

  check(fused(kFused[4], {}, &out).empty(), "fused: gather-sum");
  expected.assign(kWorld, received({in[0].data(), in[1].data()}));
  check(out == expected, "fused: sums of what all ranks have received, in their order");
}

// The handlers divide, so nobody else may. Dividing by a power of two is exact.
void means() {
  for (const Fused& call : kFused) {
    Arrays sums, out;
    Options options;
    options.divisor = 4;
    check(fused(call, {}, &sums).empty() && fused(call, options, &out).empty(), call.name);
    for (auto& rank : sums) {
      for (float& v : rank) v /= call.collective == cgx::Collective::kAllGather ? 1 : 4;
    }
    check(out == sums, std::string(call.name) + ": is divided once");
  }
}

void units() {
  const cgx::LeafUnits own = factors.view();
  const Arrays in = operands(1);
  Arrays out, plain;
  Options options;
  options.units = 1;
  check(fused(kFused[4], options, &out).empty(), "fused: gather-sum in units");
  check(out == Arrays(kWorld, received({in[0].data(), in[1].data()}, /*sums=*/true, &own)),
        "fused: sums that are still in units");
  for (const Fused* call : {&kFused[0], &kFused[3]}) {
    check(fused(*call, options, &out).empty() && fused(*call, {}, &plain).empty(),
          std::string(call->name) + " in units");
    check(out[0] == out[1] && out != plain, std::string(call->name) + ": units count");
  }
  for (const Fused* call : {&kFused[1], &kFused[2]}) {
    check(has(fused(*call, options, &out), "leaf 0 has units, but this call takes none"),
          std::string(call->name) + " takes no units");
  }
  options.bucket = 1024;
  check(has(fused(kFused[0], options, &out), "must be at most 512 with units"),
        "fused: long buckets in units");
  options = {};
  options.slots = false;
  check(has(fused(kFused[4], options, &out), "length of slots is 0, expected 9"),
        "fused: slots of fewer leaves");
}

void streams() {
  for (const Fused& call : kFused) {
    Arrays one, some;
    Options options;
    check(fused(call, options, &one).empty(), std::string(call.name) + ": one stream");
    check(emulator::used() == 1, "one stream is one communicator");
    options.streams = 3;
    check(fused(call, options, &some).empty() && one == some,
          std::string(call.name) + ": the bytes of three streams are those of one");
    check(emulator::used() == 3, "three streams are three communicators");
    options.failing = 0;
    check(has(fused(call, options, &some), "over axis 'data': ncclCommSplit: internal error"),
          std::string(call.name) + ": a split that fails");
    options.clique = false;
    check(has(fused(call, options, &some), "no clique"), "streams without a communicator");
    for (const int64_t wrong : {0, 9}) {
      options.streams = wrong;
      check(has(fused(call, options, &some),
                "over axis 'data': streams is " + std::to_string(wrong) + ", must be in [1, 8]"),
            std::string(call.name) + ": another number of streams is refused");
    }
  }
}

void fused_calls() {
  Arrays out;
  for (const int32_t minor : {1, 2, 9}) {
    Options options;
    options.minor = minor;
    check(fused(kFused[0], options, &out).empty(), "fused: extension 0." + std::to_string(minor));
    check(std::memcmp(out[0].data(), out[1].data(), 4 * kValues) == 0 && out[0][0] == out[0][0],
          "fused: ranks agree");
    check(requests == std::vector<std::string>(2, "3/0: 0 1: 2 3"),
          "fused: asks for both groups, by flattened numbers");
  }
  const struct {
    const char* says;
    void (*change)(Options&);
  } refused[] = {
      {"Extension version mismatch", [](Options& o) { o.major = 1, o.minor = 0; }},
      {"Collectives not found", [](Options& o) { o.extension = false; }},
      {"no clique", [](Options& o) { o.clique = false; }},
      {"over axis 'data': the stage Initialize of this call has not run on its device",
       [](Options& o) { o.initialize = false; }},
      {"size of the communicator is 3, expected 2", [](Options& o) { o.count = 3; }},
      {"the communicator has failed: internal error", [](Options& o) { o.state = 3; }},
      {"over axis 'data': ncclGroupStart: internal", [](Options& o) { o.failing = 0; }},
      {"over axis 'data': ncclSend: internal error", [](Options& o) { o.failing = 1; }},
      {"over axis 'data': ncclRecv: internal error", [](Options& o) { o.failing = 2; }},
      {"over axis 'data': ncclGroupEnd: internal error", [](Options& o) { o.failing = 3; }},
      {"world is 0, must be in [1, 2^20]", [](Options& o) { o.world = 0; }},
      {"size of groups is 3, must be a positive multiple of world, 2",
       [](Options& o) { o.groups = {0, 1, 2}; }},
      {"size of groups is 0, must be a positive multiple of world, 2",
       [](Options& o) { o.groups = {}; }},
  };
  for (const Fused& call : kFused) {
    for (const auto& c : refused) {
      Options options;
      c.change(options);
      const std::string said = fused(call, options, &out);
      check(has(said, c.says),
            std::string(call.name) + ": expected '" + c.says + "', got '" + said + "'");
    }
    Fused wrong = call;
    wrong.keys = 1;
    check(has(fused(wrong, {}, &out), "size of keys is 1, expected "),
          std::string(call.name) + ": keys of another size are refused");
    wrong = call;
    ++wrong.rows_out;
    check(has(fused(wrong, {}, &out), "leaf 0 has "),
          std::string(call.name) + ": a result of another size is refused");
    for (const int64_t more : {-1, 1}) {
      wrong = call;
      wrong.more_payloads = more;
      const int64_t needed = payload_bytes(call);
      check(has(fused(wrong, {}, &out), "over axis 'data': size of payloads is " +
                                            std::to_string(needed + more) + ", expected " +
                                            std::to_string(needed)),
            std::string(call.name) + ": payloads of another size are refused");
    }
  }
}

// Once a communicator is lost, all calls of NCCL fail. Whichever call is the first, the handlers
// name it, nothing waits for what is gone, and the next call, on a new communicator, is right.
void lost_communicators() {
  const struct {
    const char* name;
    bool blocks, later;
  } kinds[] = {{"fails", true, false},
               {"does not block and fails", false, false},
               {"does not block and fails later", false, true}};
  for (const Fused& call : kFused) {
    if (kHalfOfTheCases && &call != kFused) continue;
    for (const int64_t streams : {1, 3}) {
      for (const auto& kind : kinds) {
        // How NCCL fails, and on how many streams, is the same for all calls.
        const bool again = &call != kFused && (&kind != kinds || streams > 1);
        if (again || (kHalfOfTheCases && &kind != kinds)) continue;
        // With one stream the devices continue. With more, messages may wait on communicators that
        // XLA does not know; see a_lost_rank().
        Devices devices;
        Options good;
        good.streams = streams;
        good.failure.blocks = kind.blocks;
        Arrays expected, out;
        check(fused(call, good, &expected, devices).empty(), std::string(call.name) + ": at first");
        // Tries every early NCCL call, then fewer and fewer, since later segments repeat them.
        for (int64_t from = 0;; from += 1 + from / 8) {
          const std::string text = std::string(call.name) + " on " + std::to_string(streams) +
                                   " streams, NCCL " + kind.name + " from call " +
                                   std::to_string(from);
          const int results[] = {3, 4, 5, 6};
          Options bad = good;
          bad.failure = {kind.blocks, kind.later, results[from % 4], from};
          bad.aborts = true;
          const std::string said = fused(call, bad, &out, devices);
          const std::string failed = std::exchange(nccl.failed, "");
          if (failed.empty()) {
            check(from > 0 && said.empty(), text + ": all calls have failed once: " + said);
            break;
          }
          // A missing mark means that this is another communicator, which then gets a mark.
          const std::string named = failed == "ncclRedOpDestroy" ? "ncclRedOpCreatePreMulSum"
                                    : kind.later && failed == "ncclCommGetAsyncError"
                                        ? "the communicator has failed"
                                        : failed;
          const std::string expects =
              "over axis 'data': " + named + ": " + error_string(bad.failure.result);
          check(has(said, expects), text + ": expected '" + expects + "', got '" + said + "'");
          if (streams > 1) {
            devices = Devices();
          } else {
            check(!has(said, kWaiting), text + ": the streams go on");
          }
          const std::string next = fused(call, good, &out, devices);
          check(next.empty() && out == expected, text + ": on a new communicator: " + next);
        }
      }
    }
  }
}

// Whichever CUDA call fails, the handlers say so, nothing stays open, and the next call, on a new
// communicator, is right.
void cuda_failures() {
  const Fused& call = kFused[0];  // nccl/fused_test.cc has the others
  for (const int64_t streams : {1, 3}) {
    if (kHalfOfTheCases && streams == 1) continue;
    Options good;
    good.streams = streams;
    Arrays expected, out;
    check(fused(call, good, &expected).empty(), "CUDA fails: at first");
    Options bad = good;
    bad.aborts = true;
    // Tries every early call, then fewer and fewer, since later segments repeat them.
    for (bad.failing_cuda = 0;; bad.failing_cuda += 1 + bad.failing_cuda / 8) {
      const std::string text = std::to_string(streams) + " streams, CUDA fails in call " +
                               std::to_string(bad.failing_cuda);
      Devices devices;
      const std::string said = fused(call, bad, &out, devices);
      if (said.empty()) break;
      check(has(said, "over axis 'data': CUDA: unspecified launch failure"), text + ": " + said);
      if (streams > 1) devices = Devices();  // messages may wait on communicators that were split
      const std::string next = fused(call, good, &out, devices);
      check(next.empty() && out == expected, text + ": on a new communicator: " + next);
    }
    check(bad.failing_cuda > 100, "CUDA fails: in both stages");
  }
}

// A rank is lost before it sends anything. The others' handlers have put all on the streams and
// returned. XLA aborts its communicator, which frees the streams if all messages are on that one.
void a_lost_rank() {
  for (const Fused& call : kFused) {
    const std::string name = call.name;
    Arrays expected, out;
    Options lost;
    lost.executing = kWorld - 1;
    lost.aborts = true;
    const Devices devices;
    check(fused(call, {}, &expected, devices).empty(), name + ": before a rank is lost");
    check(fused(call, lost, &out, devices).empty(), name + ": the streams go on");
    check(fused(call, {}, &out, devices).empty() && out == expected, name + ": after it");
    lost.streams = 3;
    check(fused(call, lost, &out) == kWaiting, name + ": on three streams");
    lost.streams = 1;
    lost.aborts = false;
    check(fused(call, lost, &out) == kWaiting, name + ": without an abort");
  }
}

void messages_are_not_recorded() {
  for (const Fused& call : kFused) {
    check(!may_be_recorded(cgx::nccl_stages(call.collective).execute),
          "messages may not be recorded into command buffers");
  }
}

}  // namespace

namespace cgx {

const NcclLibrary* nccl_library(std::string*) {
  static const NcclLibrary emulated = emulator::nccl();
  static const NcclLibrary library = [] {
    emulator::intercept = [](const char* call) { return result_of(call); };
    NcclLibrary l = emulated;
    l.get_error_string = error_string;
    l.comm_get_async_error = [](NcclComm, int* state) {
      const char* const pending = std::exchange(nccl.pending, nullptr);
      const int result = result_of(pending ? pending : "ncclCommGetAsyncError", /*asks=*/true);
      *state = nccl.failure.later && result != kSuccess ? result : comm_state;
      return nccl.failure.later ? kSuccess : result;
    };
    l.group_end = [] { return in_progress("ncclGroupEnd", emulated.group_end()); };
    l.comm_split = [](NcclComm from, int color, int key, NcclComm* made, NcclConfig* config) {
      return in_progress("ncclCommSplit", emulated.comm_split(from, color, key, made, config));
    };
    return l;
  }();
  return &library;
}

}  // namespace cgx

int main() {
  messages_are_not_recorded();
  fused_calls();
  other_collectives();
  means();
  units();
  streams();
  lost_communicators();
  cuda_failures();
  a_lost_rank();
  return report();
}
