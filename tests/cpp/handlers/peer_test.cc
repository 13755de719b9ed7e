// The handlers of the all-reduce over peers' memory, driven by handmade call frames like those that
// XLA makes. NCCL's windows are this process's memory; windows in host memory are real. Needs the
// FFI headers of a jaxlib with the collectives extension.
#include "nccl/peer.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <thread>

#include "cases.h"
#include "handlers/collectives_extension.h"
#include "handlers/nccl.h"
#include "nccl.h"
#include "nccl/library.h"
#include "nccl/shared_memory.h"

namespace {

constexpr int kWorld = 2;
constexpr int64_t kBucket = 64;

emulator::Comm comms[kWorld];

// The emulated NCCL: the result of each call, and what it has made.
struct Nccl {
  bool windows = true, maps = true;
  int allocated = 0, registered = 0, found = 0;  // ncclResult_t
  // The first call that fails, like all calls after it (-1: none); the number of calls; its name.
  int64_t from = -1, calls = 0;
  std::string failed;
  // The memory of each window, for all ranks at once. A rank may ask for another rank's window
  // before that rank has registered it; NCCL would wait for that rank.
  std::vector<std::vector<std::unique_ptr<uint64_t[]>>> memory;
  size_t made[kWorld] = {};
  size_t gone = 0;  // windows that NCCL no longer knows
} nccl;

std::mutex nccl_mutex;  // ranks have threads while they make windows

// The result of a call: `otherwise`, unless all calls fail by now.
int result_of(const char* call, int otherwise = cgx::NcclLibrary::kSuccess) {
  const std::lock_guard<std::mutex> lock(nccl_mutex);
  // If this were the first call that fails, the communicator would count as a new one.
  if (std::strcmp(call, "ncclRedOpDestroy") == 0) return nccl.failed.empty() ? otherwise : 6;
  if (nccl.from < 0 || nccl.calls++ < nccl.from) return otherwise;
  if (nccl.failed.empty()) nccl.failed = call;
  return 6;  // ncclRemoteError
}

std::string initialized[kWorld];  // what Initialize of each rank said in the last call

// XLA makes its communicators anew, and NCCL forgets the windows and messages of the old ones.
void renew_communicators() {
  nccl.gone = std::max(nccl.made[0], nccl.made[1]);
  emulator::abort_messages(comms[0]);
  for (int r = 0; r < kWorld; ++r) {
    comms[r] = {r, kWorld, comms[r].number + 1};
    nccl.made[r] = nccl.gone;
  }
}

// Both ranks' calls, each on its own device.
struct Ranks {
  std::vector<int> devices;
  std::vector<cudaStream_t> streams;
  XLA_FFI_Collectives_Extension extensions[kWorld] = {};
  XLA_FFI_InvokeContext contexts[kWorld];

  Ranks() {
    emulator::reset();
    emulator::set_processors(4);
    nccl = Nccl();
    static int last = 0;  // new devices: what a device keeps belongs to one case's communicators
    for (int r = 0; r < kWorld; ++r) {
      comms[r] = {r, kWorld};
      devices.push_back(++last);
      emulator::set_device(last);
      streams.push_back(emulator::create_stream());
      extensions[r] = collectives(&comms[r]);
      contexts[r].device = last;
      contexts[r].stream = streams[r];
      contexts[r].extension = &extensions[r].extension_base;
    }
    emulator::set_device(0);
  }
};

struct Options {
  int64_t values = 1000, keys = 4, more_out = 0;
  bool residual = false, initialize = true;
  uint64_t seed = 1;
  int64_t timeout_ms = 300'000;
  int late = 0;            // steps that the last rank comes after the others
  int executing = kWorld;  // ranks that reach Execute
  bool units = false;
  int64_t in_host = 0;
  int initializing = kWorld;  // ranks that reach Initialize
  int64_t failing = -1;       // number of the CUDA call that fails in Initialize
};

// Runs one call of every rank, stage by stage. Returns the first error, or what is wrong with the
// results.
std::string call(Ranks& ranks, const Options& options) {
  // Whole numbers from 0 to 15, alike on all ranks: 4 bits hold them and their sum exactly.
  std::vector<float> in(options.values);
  for (int64_t i = 0; i < options.values; ++i) in[i] = static_cast<float>(i % 16);
  const uint32_t keys[4] = {1, 2, 3, 4};
  // Powers of two are exact.
  const int64_t count = 1 + options.values;  // a row's unit, and those of the columns
  std::vector<float> units(2 * count, 2.0f);
  std::fill(units.begin() + count, units.end(), 0.5f);
  units[0] = 4.0f, units[count] = 0.25f;
  const int64_t columns = options.units ? options.values : 0;
  std::vector<std::vector<float>> out(kWorld, std::vector<float>(options.values, NAN)), lost = out;
  std::vector<Frame> frames(kWorld);
  for (int r = 0; r < kWorld; ++r) {
    frames[r]
        .arg(XLA_FFI_DataType_U32, keys, {options.keys})
        .arg(XLA_FFI_DataType_F32, in.data(), {options.values});
    if (options.units) {
      frames[r].arg(XLA_FFI_DataType_F32, units.data(), {2, count});
    }
    frames[r].ret(XLA_FFI_DataType_F32, out[r].data(), {options.values + options.more_out});
    if (options.residual) frames[r].ret(XLA_FFI_DataType_F32, lost[r].data(), {options.values});
    frames[r]
        .attr("divisor", 1.0f)
        .attr("groups", std::vector<int64_t>{0, 1})
        .attr("in_host", options.in_host)
        .attr("name", "psum_compressed(exchange='peer') over axis 'data'")
        .attr("slots", std::vector<int64_t>{4, kBucket, 0, 0, 0, 0, columns, 0, options.units})
        .attr("timeout_ms", options.timeout_ms)
        .attr("world", int64_t{kWorld});
  }
  std::string error;
  const auto stage = [&](XLA_FFI_Handler* handler, XLA_FFI_ExecutionStage number,
                         int executing = kWorld) {
    for (int r = 0; r < executing && error.empty(); ++r) {
      error = frames[r].call(handler, number, &ranks.contexts[r]);
    }
  };
  stage(cgx::nccl_prepare, XLA_FFI_ExecutionStage_PREPARE);
  for (std::string& said : initialized) said = "";
  if (options.initialize && options.in_host == 0) {
    stage(cgx::peer_stages().initialize, XLA_FFI_ExecutionStage_INITIALIZE);
  } else if (options.initialize && error.empty()) {
    // The ranks wait for each other.
    std::vector<std::thread> threads;
    emulator::fail_cuda_at(options.failing);
    for (int r = 0; r < options.initializing; ++r) {
      threads.emplace_back([&, r] {
        initialized[r] = frames[r].call(cgx::peer_stages().initialize,
                                        XLA_FFI_ExecutionStage_INITIALIZE, &ranks.contexts[r]);
      });
    }
    for (std::thread& thread : threads) thread.join();
    emulator::fail_cuda_at(-1);
    for (const std::string& text : initialized) error = error.empty() ? text : error;
  }
  emulator::submit(ranks.streams.back(), [rest = options.late]() mutable { return --rest < 0; });
  stage(cgx::peer_stages().execute, XLA_FFI_ExecutionStage_EXECUTE, options.executing);
  if (!error.empty()) return error;
  if (emulator::device() != 0) return "another device is left current";
  if (!emulator::run_streams(options.seed)) return "the streams wait for ever";
  for (int r = 0; r < kWorld; ++r) {
    for (int64_t i = 0; i < options.values; ++i) {
      if (out[r][i] != 2 * in[i]) return "a sum is wrong";
      if (options.residual && lost[r][i] != 0.0f) return "a residual is wrong";
    }
  }
  return "";
}

void sums() {
  for (const bool in_host : {false, true}) {
    Ranks ranks;
    const int mapped = emulator::mappings.count;
    for (uint64_t seed = 1; seed <= 8; ++seed) {
      Options options{1000, 4, 0, seed % 2 == 0, true, seed};
      options.units = seed % 3 == 0, options.in_host = in_host;
      const std::string said = call(ranks, options);
      check(said.empty(), "sums: " + said);
    }
    check(nccl.made[0] == !in_host && nccl.made[1] == !in_host &&
              emulator::mappings.count - mapped == (in_host ? kWorld : 0),
          "one window does for all calls");
  }
  Ranks ranks;
  Options options;
  check(call(ranks, options).empty(), "sums");
  options.in_host = true;
  check(call(ranks, options).empty() && nccl.made[0] == 1, "one window of each kind of memory");
  Options larger;
  larger.values = 200000;
  check(call(ranks, larger).empty() && nccl.made[0] == 2, "a larger call gets a larger one");
  check(call(ranks, {}).empty() && nccl.made[0] == 2, "which does for smaller calls too");
  renew_communicators();
  check(call(ranks, {}).empty() && nccl.made[0] == 3,
        "a window that NCCL no longer knows is not used");
}

void refused() {
  const struct {
    const char* says;
    void (*change)(Options&);
  } cases[] = {
      {"has no ncclGetPeerDevicePointer; it needs NCCL 2.29",
       [](Options&) { nccl.windows = false; }},
      {"ncclMemAlloc of a window of ", [](Options&) { nccl.allocated = 3; }},
      {"ncclCommWindowRegister: internal error", [](Options&) { nccl.registered = 3; }},
      {"ncclGetPeerDevicePointer: internal error", [](Options&) { nccl.found = 3; }},
      {"rank 0 has no access to the memory of rank 0; it needs all ranks in one node",
       [](Options&) { nccl.maps = false; }},
      {"the stage Initialize of this call has not run on its device",
       [](Options& o) { o.initialize = false; }},
      {"in_host is 2, must be 0 or 1", [](Options& o) { o.in_host = 2; }},
      {"size of keys is 2, expected 4", [](Options& o) { o.keys = 2; }},
      {"result leaf 0 has 1001 values", [](Options& o) { o.more_out = 1; }},
  };
  for (const auto& c : cases) {
    Ranks ranks;
    Options options;
    c.change(options);
    const std::string said = call(ranks, options);
    check(has(said, "psum_compressed(exchange='peer') over axis 'data': ") && has(said, c.says),
          std::string("expected '") + c.says + "', got '" + said + "'");
  }
}

// Names of shared memory that this process has left.
int names_left() {
  int count = 0;
  for (const auto& file : std::filesystem::directory_iterator("/dev/shm")) {
    count += has(file.path().filename(), "cgx_jax-" + std::to_string(getpid()) + "-");
  }
  return count;
}

// Memory goes by its name until its maker is gone.
void shared_memory() {
  constexpr size_t kBytes = 1 << 16;
  const int mapped = emulator::mappings.count;
  uint8_t *one = nullptr, *other = nullptr;
  std::string name;
  {
    cgx::SharedMemory memory, view, dropped;
    check(memory.create(kBytes).empty() && names_left() == 1, "shared memory: is made");
    name = memory.name();
    check(memory.map(name, kBytes).empty() && view.map(name, kBytes).empty() &&
              dropped.map(name, kBytes).empty(),
          "shared memory: is mapped");
    one = memory.keep(), other = view.keep();
  }
  check(emulator::mappings.count == mapped + 2, "shared memory: a view that is not kept goes");
  check(std::all_of(one, one + kBytes, [](uint8_t byte) { return byte == 0; }),
        "shared memory: is zeros");
  one[kBytes - 1] = 7;
  check(other[kBytes - 1] == 7, "shared memory: is shared");
  check(has(cgx::SharedMemory().map(name, kBytes), "shm_open: No such file"),
        "shared memory: has no name any more");
  check(has(cgx::SharedMemory().create(size_t{1} << 60), "no 1152921504606846976 bytes of shared"),
        "shared memory: room is asked for");
  check(names_left() == 0, "shared memory: no name is left");
}

// If a rank cannot map the windows, all ranks say so, and nothing of them is left. The next call is
// right. A rank that fails where the others cannot hear it lets them wait.
void host_windows_that_fail() {
  for (int r = 0; r < kWorld; ++r) {
    Ranks ranks;
    Options options;
    options.in_host = 1;
    const int mapped = emulator::mappings.count;
    emulator::mappings.refused_on = ranks.devices[r];
    call(ranks, options);
    const std::string expected = "over axis 'data': rank " + std::to_string(r) +
                                 ": no access to the windows, CUDA: out of memory; all ranks must";
    for (const std::string& said : initialized) {
      check(has(said, expected), "host: expected '" + expected + "', got '" + said + "'");
    }
    check(emulator::mappings.count == mapped && names_left() == 0, "host: nothing is left");
    emulator::mappings.refused_on = -1;
    const std::string next = call(ranks, options);
    check(next.empty(), "host: after a failure: " + next);
  }
  bool failed = true;
  for (int64_t k = 0; failed; ++k) {
    Ranks ranks;
    Options options;
    options.in_host = 1, options.failing = k, options.timeout_ms = 1;
    const std::string said = call(ranks, options);
    failed = !said.empty();
    check(!failed || has(said, "over axis 'data': "), "host: " + said);
    check(names_left() == 0, "host: a name is left after failing call " + std::to_string(k));
    check(failed || k > 20, "host: calls that fail are seen");
  }
  Ranks ranks;
  Options options;
  options.in_host = 1, options.initializing = 1, options.timeout_ms = 250;
  const std::string said = call(ranks, options);
  check(has(said, "a rank has not come to this call after 0.25 s"), "host: missing rank: " + said);
  options.timeout_ms = 1;
  check(has(call(ranks, options), "after 0.2 s"), "host: making windows may take longer");
}

// Once a communicator is lost, all calls of NCCL fail. Whichever call is the first, the handlers
// name it, and the next call, on a new communicator, is right.
void lost_communicators(bool in_host) {
  bool lost = true;
  for (int64_t from = 0; lost; ++from) {
    Ranks ranks;
    nccl.from = from;
    Options options;
    options.in_host = in_host;
    Options impatient = options;
    impatient.timeout_ms = in_host ? 1 : options.timeout_ms;
    const std::string said = call(ranks, impatient), failed = nccl.failed;
    const std::string text = "lost: from call " + std::to_string(from) + ": " + said;
    lost = !said.empty();
    if (!lost) {
      check(from > 0 && failed.empty(), text);
      continue;
    }
    // The message about ncclMemAlloc has more words in between. In host memory, ranks run at once,
    // and one may wait in vain for another that has failed.
    check(has(said, "over axis 'data': " + (in_host ? "" : failed)) &&
              (has(said, ": internal error") || (in_host && has(said, "has not come to this"))),
          text);
    nccl.from = -1;
    renew_communicators();
    // A kernel whose peer's rank is lost waits for minutes. Kernels on other devices do not.
    if (emulator::launches() > 0) {
      Ranks others;
      check(call(others, options).empty(), text + ": on other devices");
    } else {
      const std::string next = call(ranks, options);
      check(next.empty(), text + ": on a new communicator: " + next);
    }
  }
}

// A window has room for the addresses of 32 ranks.
void more_ranks_than_a_window_has_room_for() {
  Ranks ranks;
  cgx::OwnedLayout owned;
  check(owned.build({{1000, 4, kBucket, 0, 0}}, 33).empty(), "ranks: layout");
  std::string unused;
  const std::string said = cgx::PeerLane().prepare(owned.view(), {}, *cgx::nccl_library(&unused),
                                                   reinterpret_cast<cgx::NcclComm>(&comms[0]), 0);
  check(said == "the number of ranks is 33, must be at most 32", "ranks: " + said);
}

// A call waits for its timeout, whose unit the kernel must know: the emulator's clock goes on by a
// nanosecond whenever it is read. After a launch has given up, the next call says so.
void a_rank_has_until_the_timeout() {
  Options options;
  options.timeout_ms = 1;
  options.late = 100;
  Ranks ranks;
  check(call(ranks, options).empty(), "timeout: a late rank is waited for");
  options.executing = 1;
  check(call(ranks, options) == "a sum is wrong", "timeout: a rank that does not come is not");
  check(has(call(ranks, options),
            "over axis 'data': an earlier call waited for a rank in vain, and its results are NaN: "
            "see whether every process still runs and makes the same calls in one order, and start "
            "all of them again. If a rank is only slow, use a larger timeout than "
            "Peer(timeout=0.001)"),
        "timeout: the next call says so");
  for (const int64_t wrong : {int64_t{0}, int64_t{1'000'000'000'001}}) {
    options.timeout_ms = wrong;
    check(has(call(ranks, options), "over axis 'data': timeout_ms is " + std::to_string(wrong) +
                                        ", must be in [1, 10^12]"),
          "timeout: others are refused");
  }
}

}  // namespace

namespace cgx {

NcclLibrary make_library(bool windows) {
  NcclLibrary library = emulator::nccl();
  if (!windows) return library;
  library.mem_alloc = [](void** memory, size_t bytes) {
    const int rank = (emulator::device() - 1) % kWorld;
    if (nccl.memory.size() == nccl.made[rank]) {
      nccl.memory.emplace_back();
      for (int r = 0; r < kWorld; ++r) nccl.memory.back().emplace_back(new uint64_t[bytes / 8]);
    }
    *memory = nccl.memory[nccl.made[rank]][rank].get();
    return result_of("ncclMemAlloc", nccl.allocated);
  };
  // A window's number stands for it.
  library.window_register = [](NcclComm comm, void*, size_t, NcclWindow* window, int) {
    const int rank = reinterpret_cast<emulator::Comm*>(comm)->rank;
    *window = reinterpret_cast<NcclWindow>(++nccl.made[rank]);
    return result_of("ncclCommWindowRegister", nccl.registered);
  };
  library.peer_pointer = [](NcclWindow window, size_t, int peer, void** pointer) {
    const size_t number = reinterpret_cast<size_t>(window);
    if (number <= nccl.gone) return 4;  // ncclInvalidArgument
    *pointer = nccl.maps ? nccl.memory[number - 1][peer].get() : nullptr;
    return result_of("ncclGetPeerDevicePointer", nccl.found);
  };
  return library;
}

const NcclLibrary* nccl_library(std::string*) {
  static const NcclLibrary library = make_library(true), old = make_library(false);
  return nccl.windows ? &library : &old;
}

}  // namespace cgx

int main() {
  emulator::intercept = [](const char* call) { return result_of(call); };
  sums();
  refused();
  shared_memory();
  host_windows_that_fail();
  for (const bool in_host : {false, true}) lost_communicators(in_host);
  more_ranks_than_a_window_has_room_for();
  a_rank_has_until_the_timeout();
  return report();
}
