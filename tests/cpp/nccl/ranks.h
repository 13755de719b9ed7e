// The fused calls of all ranks in this process, on emulated devices.
#ifndef CGX_TESTS_NCCL_RANKS_H_
#define CGX_TESTS_NCCL_RANKS_H_

#include "nccl.h"
#include "nccl/fused.h"
#include "problem.h"

namespace {

cgx::NcclLibrary& emulated_nccl() {
  static cgx::NcclLibrary library = emulator::nccl();
  return library;
}

// How a problem's calls are run.
struct Run {
  int64_t segment_bytes;
  uint64_t seed = 1;  // of the order of streams
  int64_t streams = 1;
  int64_t left_out = -1;      // the number of a wait to leave out
  int calls = 1;              // one after the other on the same streams and memory
  int64_t failing = -1;       // the number of an NCCL call that fails
  int64_t cuda_failing = -1;  // of a CUDA call
};

// All ranks of a problem on one emulator.
class Ranks {
 public:
  Ranks(const Problem& problem, const Run& run)
      : problem_(problem),
        run_(run),
        scratch_(problem.world),
        comms_(problem.world),
        lanes_(problem.world),
        out_(problem.world, problem.empty(problem.rows_out, problem.sums)),
        lost_(problem.world, problem.empty(1, problem.dtypes)) {
    emulator::reset();
    const int64_t bytes =
        cgx::CudaFused::scratch_bytes(problem.collective, problem.owned.view(), run.segment_bytes);
    for (int64_t r = 0; r < problem.world; ++r) {
      scratch_[r].assign(bytes, 0xCD);
      comms_[r] = {static_cast<int>(r), static_cast<int>(problem.world)};
      emulator::set_device(static_cast<int>(r));
      streams_.push_back(emulator::create_stream());
    }
    emulator::set_device(0);
  }

  // Run the stages of a rank's call. They return what went wrong, or "".
  std::string initialize(int64_t rank, int64_t streams) {
    const int64_t segments = cgx::CudaFused::segments(problem_.owned.view(), run_.segment_bytes);
    emulator::set_device(static_cast<int>(rank));
    std::string error = lanes_[rank].prepare(segments);
    if (error.empty()) {
      error = lanes_[rank].connect(streams, emulated_nccl(), comm(rank), static_cast<int32_t>(rank),
                                   problem_.world);
    }
    return error;
  }
  std::string execute(int64_t rank, int64_t streams) {
    const auto from = problem_.pointers_of_rows(problem_.in[rank]),
               to = problem_.pointers_of_rows(out_[rank]),
               lost = problem_.pointers_of_rows(lost_[rank]);
    const cgx::DType* const dtypes = problem_.dtypes.data();
    emulator::set_device(static_cast<int>(rank));
    std::string error;
    for (int call = 0; call < run_.calls; ++call) {
      cgx::CudaFused fused({problem_.collective,
                            problem_.owned.view(),
                            {from.data(), dtypes},
                            {to.data(), problem_.sums.data()},
                            {problem_.residual ? lost.data() : nullptr, dtypes},
                            problem_.keys[rank].data(),
                            problem_.divisor,
                            static_cast<int32_t>(rank),
                            run_.segment_bytes,
                            streams,
                            scratch_[rank].data(),
                            problem_.all_units()},
                           emulated_nccl(), comm(rank), lanes_[rank], streams_[rank]);
      const std::string said = fused.run();
      if (!said.empty()) error = said;
    }
    return error;
  }
  bool right() const {
    for (int64_t r = 0; r < problem_.world; ++r) {
      if (problem_.expected[r] != out_[r]) return false;
      if (problem_.residual && problem_.expected_lost[r] != lost_[r]) return false;
    }
    return true;
  }

  cgx::NcclComm comm(int64_t rank) { return emulator::handle(&comms_[rank]); }
  cgx::CudaLane& lane(int64_t rank) { return lanes_[rank]; }
  cudaStream_t stream(int64_t rank) const { return streams_[rank]; }

 private:
  const Problem& problem_;
  const Run run_;
  std::vector<Bytes> scratch_;
  std::vector<emulator::Comm> comms_;
  std::vector<cgx::CudaLane> lanes_;
  std::vector<cudaStream_t> streams_;
  std::vector<Values> out_, lost_;
};

struct Outcome {
  bool finished = true, right = false;
  std::string error;

  explicit operator bool() const { return finished && right && error.empty(); }
};

// Runs all ranks' calls on one thread: stage by stage, rank by rank.
Outcome outcome(const Problem& problem, const Run& run) {
  Ranks ranks(problem, run);
  Outcome outcome;
  const auto note = [&](const std::string& error) {
    if (!error.empty()) outcome.error = error;
  };
  for (int64_t r = 0; r < problem.world; ++r) note(ranks.initialize(r, run.streams));
  emulator::forget_used();
  emulator::leave_out(run.left_out);
  emulator::fail_at(run.failing);
  emulator::fail_cuda_at(run.cuda_failing);
  const int64_t made = emulator::made();
  for (int64_t r = 0; r < problem.world; ++r) note(ranks.execute(r, run.streams));
  emulator::fail_cuda_at(-1);
  check(!emulator::in_group(), "no group stays open");
  check(emulator::made() == made, "nothing is made between messages");
  if (outcome.error.empty()) outcome.finished = emulator::run_streams(run.seed);
  outcome.right = ranks.right();
  return outcome;
}

// Checks that without any single wait, some order of the streams gives a wrong result. Returns the
// number of waits.
[[maybe_unused]] int64_t every_wait_is_needed(const Problem& problem, int64_t segment_bytes,
                                              int64_t streams, const std::string& name) {
  check(bool(outcome(problem, {segment_bytes, 2, streams})), name + ": all waits");
  const int64_t count = emulator::waits();
  for (int64_t wait = 0; wait < count; ++wait) {
    bool caught = false;
    for (uint64_t seed = 1; seed <= 60 && !caught; ++seed) {
      caught = !outcome(problem, {segment_bytes, seed, streams, wait});
    }
    check(caught, name + " of world " + std::to_string(problem.world) + ": nothing misses wait " +
                      std::to_string(wait) + " of " + std::to_string(count));
  }
  return count;
}

const struct {
  cgx::Collective collective;
  std::string name;
  bool residual;
} kCollectives[] = {{cgx::Collective::kAllReduce, "all-reduce", false},
                    {cgx::Collective::kAllReduce, "all-reduce with residuals", true},
                    {cgx::Collective::kReduceScatter, "reduce-scatter", false},
                    {cgx::Collective::kAllGather, "all-gather", false},
                    {cgx::Collective::kGatherSum, "gather-sum", false},
                    {cgx::Collective::kGatherSum, "gather-sum with residuals", true}};

// Test leaves. They are shorter for the collectives other than
// all-reduce, which have them once per rank.
std::vector<cgx::SlotSpec> leaves(cgx::Collective collective, int64_t rounding,
                                  bool rotated = false) {
  const int64_t size = collective == cgx::Collective::kAllReduce ? 777 : 177;
  return {{size + 223, 4, 64, rounding, 0, rotated},
          {3, 8, 32, 0, 1, 1},
          {size, 3, 96, rounding, 2, 0, 9}};
}

}  // namespace

#endif  // CGX_TESTS_NCCL_RANKS_H_
