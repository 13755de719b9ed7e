// The fused calls on CUDA, all ranks in this process. The calls' own schedule, streams and kernels
// run on emulated streams, whose order a seed chooses. The results are compared with the steps of
// the xla exchange on the CPU kernels, byte for byte.
#include "nccl/ranks.h"

namespace {

void equals_the_steps() {
  for (const auto& [collective, name, residual] : kCollectives) {
    for (const int64_t world : {1, 2, 3, 4, 8}) {
      if (world == 8 && collective == cgx::Collective::kGatherSum) continue;  // like world 4
      for (const int64_t rounding : {0, 2}) {
        const Problem problem(collective, leaves(collective, rounding), world,
                              static_cast<float>(world), residual);
        for (const int64_t segment_bytes : {1, 40, 100, 1 << 20}) {
          for (uint64_t seed = 1; seed <= 2; ++seed) {
            Run run{segment_bytes, seed};
            run.calls = 2;
            check(bool(outcome(problem, run)), name + " of world " + std::to_string(world) +
                                                   " segments of " + std::to_string(segment_bytes) +
                                                   " seed " + std::to_string(seed));
          }
        }
      }
    }
    // Fewer records than ranks: some chunks are empty, and their segments send no messages.
    const Problem few(collective, {{40, 2, 32, 0, 0}}, 8, 1.0f, residual);
    check(bool(outcome(few, {1 << 20})), name + " of fewer records than ranks");
    for (const auto dtype : {cgx::DType::kBF16, cgx::DType::kF16}) {
      const Problem halves(collective, leaves(collective, 2), 3, 3.0f, residual, dtype);
      check(bool(outcome(halves, {100})),
            name + " of dtype " + std::to_string(static_cast<int>(dtype)));
    }
  }
}

// With units, for the collectives that take them.
void multiplies_by_units() {
  for (const auto& [collective, name, residual] : kCollectives) {
    if (collective != cgx::Collective::kAllReduce && collective != cgx::Collective::kGatherSum) {
      continue;
    }
    for (const auto dtype : {cgx::DType::kF32, cgx::DType::kBF16, cgx::DType::kF16}) {
      for (const int64_t rounding : {0, 1, 2}) {
        const auto specs = leaves(collective, rounding, /*rotated=*/true);
        const Problem problem(collective, specs, 3, 3.0f, residual, dtype, /*zeros=*/true,
                              /*in_units=*/true);
        for (const int64_t segment_bytes : {40, 1 << 20}) {
          check(bool(outcome(problem, {segment_bytes})),
                name + " in units of dtype " + std::to_string(static_cast<int>(dtype)) +
                    " rounding " + std::to_string(rounding) + " segments of " +
                    std::to_string(segment_bytes));
        }
      }
    }
  }
}

// Every single wait is needed: without it, some order of the streams gives a wrong result.
void every_wait_is_needed() {
  for (const auto& [collective, name, residual] : kCollectives) {
    const bool whole = collective == cgx::Collective::kAllReduce;
    for (const int64_t world : {2, 3}) {
      if (residual && world > 2) continue;  // the waits are the same as without residuals
      // Every segment is one record, and every chunk has at least four. No record is like one that
      // has not arrived.
      const Problem problem(collective, {{whole ? 768 : 256, 4, 64, 0, 0}}, world, 1.0f, residual,
                            cgx::DType::kF32, /*zeros=*/false);
      const int64_t segment_bytes = 45;
      const int64_t count = every_wait_is_needed(problem, segment_bytes, 1, name);
      check(count >= (whole ? 4 : 2) * 4 * world, name + ": several segments");
    }
  }
}

// A communicator may put its messages on the stream late. However late that is, the call is over
// only then: XLA may reuse the memory of a call that is over. An abort ends the wait.
void waits_for_late_communicators() {
  using std::chrono::steady_clock;
  static bool pending;
  static steady_clock::time_point begin;
  const auto collective = cgx::Collective::kAllReduce;
  const Problem problem(collective, leaves(collective, 0), 2, 1.0f);
  cgx::NcclLibrary& nccl = emulated_nccl();
  const cgx::NcclLibrary blocking = nccl;
  nccl.group_end = [] {
    pending = true;
    begin = steady_clock::now();
    return cgx::NcclLibrary::kInProgress;
  };
  nccl.comm_get_async_error = [](cgx::NcclComm, int* state) {
    const bool late = steady_clock::now() - begin > std::chrono::milliseconds(20);
    if (late && std::exchange(pending, false)) emulator::group_end();
    *state = late ? cgx::NcclLibrary::kSuccess : cgx::NcclLibrary::kInProgress;
    return cgx::NcclLibrary::kSuccess;
  };
  check(bool(outcome(problem, {1 << 20})), "messages that come late");
  nccl.group_end = [] {
    emulator::group_end();
    return cgx::NcclLibrary::kInProgress;
  };
  nccl.comm_get_async_error = [](cgx::NcclComm, int* state) {
    *state = 6;  // ncclRemoteError
    return cgx::NcclLibrary::kSuccess;
  };
  check(outcome(problem, {100}).error == "ncclGroupEnd: internal error", "an aborted one");
  nccl.comm_get_async_error = [](cgx::NcclComm, int*) { return 4; };  // ncclInvalidArgument
  check(outcome(problem, {100}).error == "ncclGroupEnd: internal error", "one that is no more");
  nccl = blocking;
}

// Whichever NCCL call fails, the error names it, and no group stays open.
void failures_are_named() {
  for (const auto& [collective, name, residual] : kCollectives) {
    const Problem problem(collective, {{600, 4, 64, 0, 0}}, 2, 1.0f, residual);
    for (int64_t call = 0; call < 16; ++call) {
      Run run{45};
      run.failing = call;
      const std::string error = outcome(problem, run).error;
      const char* const names[] = {"ncclGroupStart", "ncclSend", "ncclRecv", "ncclGroupEnd"};
      check(error == std::string(names[call % 4]) + ": internal error",
            name + ": failing call " + std::to_string(call) + ": " + error);
    }
  }
}

// Whichever CUDA call fails, the call says so, and its group is closed.
void cuda_failures_are_named() {
  for (const auto& [collective, name, residual] : kCollectives) {
    const Problem problem(collective, {{600, 4, 64, 0, 0}}, 2, 1.0f, residual);
    Run run{45};
    bool fails = true;
    for (run.cuda_failing = 0; fails; ++run.cuda_failing) {
      const Outcome of_call = outcome(problem, run);
      fails = !of_call.error.empty();
      check(
          fails ? of_call.error == "CUDA: unspecified launch failure" : of_call.right,
          name + ": failing CUDA call " + std::to_string(run.cuda_failing) + ": " + of_call.error);
    }
    check(run.cuda_failing > 20, name + ": kernels and events fail");
  }
}

// The sizes that cgx_jax/exchanges/nccl.py computes, in tests/test_shards.py.
void payload_memory() {
  const struct {
    cgx::Collective collective;
    int64_t size, bytes;
  } cases[] = {{cgx::Collective::kAllReduce, 2048 * 2048, 4'327'424},
               {cgx::Collective::kAllReduce, 25'000'000, 25'788'416},
               {cgx::Collective::kReduceScatter, 25'000'000 / 8, 25'786'368},
               {cgx::Collective::kAllGather, 25'000'000 / 8, 12'893'184},
               {cgx::Collective::kGatherSum, 25'000'000 / 8, 12'893'184}};
  for (const auto& c : cases) {
    const bool whole = c.collective == cgx::Collective::kAllReduce;
    cgx::OwnedLayout owned;
    check(owned.build(std::vector<cgx::SlotSpec>(whole ? 1 : 8, {c.size, 4, 512, 0, 0}), 8).empty(),
          "layout");
    const int64_t bytes = cgx::CudaFused::scratch_bytes(c.collective, owned.view(), 1 << 20);
    check(bytes == c.bytes,
          "payload memory of " + std::to_string(c.size) + " values: " + std::to_string(bytes));
  }
}

}  // namespace

int main() {
  payload_memory();
  equals_the_steps();
  multiplies_by_units();
  every_wait_is_needed();
  waits_for_late_communicators();
  failures_are_named();
  cuda_failures_are_named();
  return report();
}
