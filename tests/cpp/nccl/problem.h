// A fused call of every rank in this process, on emulated devices, and its expected results: those
// of the steps of the xla exchange on the CPU kernels.
#ifndef CGX_TESTS_NCCL_PROBLEM_H_
#define CGX_TESTS_NCCL_PROBLEM_H_

#include <algorithm>
#include <utility>

#include "cases.h"
#include "cpu/kernels.h"
#include "nccl.h"
#include "nccl/fused.h"

namespace {

using Bytes = std::vector<uint8_t>;
using Values = std::vector<Bytes>;  // of leaves

cgx::NcclLibrary& emulated_nccl() {
  static cgx::NcclLibrary library = emulator::nccl();
  return library;
}

std::vector<void*> pointers(const Values& leaves) {
  std::vector<void*> all;
  for (const auto& leaf : leaves) all.push_back(const_cast<uint8_t*>(leaf.data()));
  return all;
}

// A collective of leaves of given sizes over `world` ranks.
struct Problem {
  cgx::Collective collective;
  bool residual;
  int64_t world;
  float divisor;
  int64_t rows_in, rows_out;  // of the leaves, in a rank's memory
  std::vector<cgx::SlotSpec> specs;
  std::vector<Values> in;                   // by rank, row and leaf
  std::vector<std::vector<uint32_t>> keys;  // by rank
  std::vector<cgx::DType> dtypes, sums;     // of all rows, and of their results
  SomeUnits factors;                        // what `units` are made of
  std::vector<cgx::LeafUnits> units;        // of all rows, or empty
  cgx::OwnedLayout row, owned;              // of one row; of all rows that travel together
  std::vector<Values> expected, expected_lost;

  Problem(cgx::Collective collective, std::vector<cgx::SlotSpec> leaves, int64_t world,
          float divisor, bool residual = false, cgx::DType dtype = cgx::DType::kF32,
          bool zeros = true, bool in_units = false)
      : collective(collective),
        residual(residual),
        world(world),
        divisor(divisor),
        rows_in(collective == cgx::Collective::kReduceScatter ? world : 1),
        rows_out(collective == cgx::Collective::kAllGather ? world : 1),
        specs(std::move(leaves)),
        keys(world) {
    const int64_t rows = collective == cgx::Collective::kAllReduce ? 1 : world;
    std::mt19937 rng(5);
    std::vector<cgx::SlotSpec> all;
    for (int64_t r = 0; r < rows; ++r) all.insert(all.end(), specs.begin(), specs.end());
    dtypes.assign(all.size(), dtype);
    sums = dtypes;
    if (in_units) {
      const auto once = factors.of(specs, rng);
      for (int64_t r = 0; r < rows; ++r) units.insert(units.end(), once.begin(), once.end());
    }
    for (size_t k = 0; k < units.size(); ++k) {
      if (collective == cgx::Collective::kGatherSum && units[k].rows) sums[k] = cgx::DType::kF32;
    }
    for (int64_t r = 0; r < world; ++r) {
      in.emplace_back();
      for (int64_t row = 0; row < rows_in; ++row) {
        const Buffers buffers(specs, dtype, rng, zeros);
        for (size_t k = 0; k < specs.size(); ++k) {
          const auto* const data = static_cast<const uint8_t*>(buffers.data[k]);
          in[r].emplace_back(data, data + specs[k].size * cgx::item_size(dtype));
        }
      }
      for (int64_t k = 0; k < 2 * world + 2; ++k) keys[r].push_back(rng());
    }
    check(row.build(specs, 1).empty() && owned.build(all, world).empty(), "layout");
    expected_lost.assign(world, empty(1, dtypes));
    if (collective == cgx::Collective::kAllReduce) expected = all_reduce_in_steps();
    if (collective == cgx::Collective::kReduceScatter) expected = reduce_scatter_in_steps();
    if (collective == cgx::Collective::kAllGather) expected = all_gather_in_steps();
    if (collective == cgx::Collective::kGatherSum) expected = gather_sum_in_steps();
  }

  // The same for all rows. If there is only one row in memory, it stands for every row.
  std::vector<void*> pointers_of_rows(const Values& leaves) const {
    std::vector<void*> all = pointers(leaves);
    while (all.size() < dtypes.size()) all.push_back(all[all.size() - specs.size()]);
    return all;
  }

  // Leaves of these dtypes in which every value is NaN.
  Values empty(int64_t rows, const std::vector<cgx::DType>& of) const {
    Values leaves;
    for (int64_t r = 0; r < rows; ++r) {
      for (size_t k = 0; k < specs.size(); ++k) {
        leaves.emplace_back(specs[k].size * cgx::item_size(of[k]), 0xFF);
      }
    }
    return leaves;
  }

  const cgx::LeafUnits* all_units() const { return units.empty() ? nullptr : units.data(); }

  // Encode, all_to_all, reduce, all_gather and decode, one after the other.
  std::vector<Values> all_reduce_in_steps() {
    const cgx::Layout layout = owned.view();
    const int64_t bytes = layout.chunk_bytes, total = layout.total_bytes();
    const cgx::KernelTable& cpu = cgx::current_kernels();
    std::vector<Bytes> sent(world, Bytes(world * bytes));
    std::vector<float> scratch(owned.scratch_values());
    for (int64_t r = 0; r < world; ++r) {
      const auto leaves = pointers(in[r]), lost = pointers(expected_lost[r]);
      cpu.encode({layout,
                  {leaves.data(), dtypes.data()},
                  {lost.data(), dtypes.data()},
                  keys[r].data(),
                  r,
                  sent[r].data(),
                  scratch.data(),
                  all_units()},
                 0, total);
    }
    Bytes gathered(world * bytes), received(world * bytes);
    for (int64_t r = 0; r < world; ++r) {
      for (int64_t from = 0; from < world; ++from) {
        std::copy_n(&sent[from][r * bytes], bytes, &received[from * bytes]);
      }
      const auto leaves = pointers(in[r]), lost = pointers(expected_lost[r]);
      cpu.reduce({layout,
                  {leaves.data(), dtypes.data()},
                  keys[r].data() + 2,
                  r,
                  received.data(),
                  divisor,
                  &gathered[r * bytes],
                  scratch.data(),
                  {lost.data(), dtypes.data()},
                  all_units()},
                 layout.begin[r], layout.begin[r + 1]);
    }
    Values out = empty(1, dtypes);
    const auto leaves = pointers(out);
    cpu.decode(
        {layout, gathered.data(), {leaves.data(), dtypes.data()}, scratch.data(), all_units()}, 0,
        total);
    return std::vector<Values>(world, out);
  }

  // A rank's leaves of row `from`, encoded separately.
  Bytes encoded(int64_t rank, int64_t from, Values* residuals = nullptr) const {
    const cgx::Layout layout = row.view();
    const auto leaves = pointers(in[rank]);
    const auto lost = residuals ? pointers(*residuals) : std::vector<void*>();
    Bytes payload(layout.chunk_bytes);
    std::vector<float> scratch(row.scratch_values());
    cgx::current_kernels().encode({layout,
                                   {leaves.data() + from * specs.size(), dtypes.data()},
                                   {residuals ? lost.data() : nullptr, dtypes.data()},
                                   keys[rank].data() + 2 * from,
                                   -1,
                                   payload.data(),
                                   scratch.data(),
                                   all_units()},
                                  0, layout.total_bytes());
    return payload;
  }

  // (leaves + decoded payloads of all ranks except `but`) / divisor.
  Values sum(const std::vector<void*>& leaves, const Bytes& payloads, int64_t but) const {
    const cgx::Layout layout = row.view();
    std::vector<float> scratch(row.scratch_values());
    Values total = empty(1, sums);
    const auto out = pointers(total);
    cgx::current_kernels().accumulate({layout,
                                       {leaves.data(), sums.data()},
                                       payloads.data(),
                                       world,
                                       but,
                                       divisor,
                                       {out.data(), sums.data()},
                                       scratch.data()},
                                      0, layout.total_bytes());
    return total;
  }

  // Encode every row, all_to_all, accumulate.
  std::vector<Values> reduce_scatter_in_steps() const {
    std::vector<Values> totals;
    for (int64_t r = 0; r < world; ++r) {
      Bytes received;
      for (int64_t from = 0; from < world; ++from) {
        const Bytes payload = encoded(from, r);
        received.insert(received.end(), payload.begin(), payload.end());
      }
      const auto leaves = pointers(in[r]);
      const auto own = leaves.begin() + r * specs.size();
      totals.push_back(sum({own, own + specs.size()}, received, r));
    }
    return totals;
  }

  // Encode, all_gather, accumulate all payloads from zeros.
  std::vector<Values> gather_sum_in_steps() {
    Bytes gathered;
    for (int64_t r = 0; r < world; ++r) {
      const Bytes payload = encoded(r, 0, &expected_lost[r]);
      gathered.insert(gathered.end(), payload.begin(), payload.end());
    }
    Values zeros = empty(1, sums);
    for (auto& leaf : zeros) std::fill(leaf.begin(), leaf.end(), uint8_t{0});
    return std::vector<Values>(world, sum(pointers(zeros), gathered, -1));
  }

  // Encode, all_gather, decode every row.
  std::vector<Values> all_gather_in_steps() const {
    const cgx::Layout layout = row.view();
    Values out = empty(world, dtypes);
    const auto leaves = pointers(out);
    std::vector<float> scratch(row.scratch_values());
    for (int64_t r = 0; r < world; ++r) {
      cgx::current_kernels().decode({layout,
                                     encoded(r, 0).data(),
                                     {leaves.data() + r * specs.size(), dtypes.data()},
                                     scratch.data()},
                                    0, layout.total_bytes());
    }
    return std::vector<Values>(world, out);
  }
};

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

#endif  // CGX_TESTS_NCCL_PROBLEM_H_
