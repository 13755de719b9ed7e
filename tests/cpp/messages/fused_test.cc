// The fused all-reduce and gather-sum of virtual ranks, over messages that are delayed at random.
// They give the same bytes as the kernels and the exchanges between them, run one after the other.
#include "messages/fused.h"

#include <algorithm>

#include "counted_memory.h"
#include "messages/network.h"
#include "problem.h"

namespace {

using cgx::Collective;
using cgx::DType;

struct Case {
  std::vector<cgx::SlotSpec> leaves;
  DType dtype = DType::kF32;
  int64_t world = 2;
  cgx::CallSettings settings{1 << 16, 4};
  bool residual = true;
  bool units = false;
  bool in_place = false;  // results take the memory of the leaves
  Collective collective = Collective::kAllReduce;
};

// One call on every rank.
struct Job {
  Job(const Case& c, int tag)
      : test(c),
        tag(tag),
        problem(c.collective, c.leaves, c.world, 3.0f, c.residual, c.dtype, /*zeros=*/true,
                c.units),
        outputs(c.world, problem.empty(1, problem.sums)),
        residuals(c.world, problem.empty(1, problem.dtypes)) {
    if (c.in_place) outputs = problem.in;
  }
  // In a gather-sum each rank sends its own leaves to all, so they are one chunk.
  bool gathers() const { return test.collective == Collective::kGatherSum; }
  const cgx::OwnedLayout& layout() const { return gathers() ? problem.row : problem.owned; }

  std::unique_ptr<cgx::FusedCall> start(int64_t rank, Network& network, cgx::WorkerPool& workers,
                                        cgx::BufferPool& buffers) {
    const size_t count = test.leaves.size();
    const auto in = pointers(test.in_place ? outputs[rank] : problem.in[rank]);
    cgx::FusedSpec spec;
    spec.collective = test.collective;
    spec.world = test.world;
    spec.owned = layout();
    spec.in.assign(in.begin(), in.end());
    spec.out = pointers(outputs[rank]);
    if (test.residual) spec.residuals = pointers(residuals[rank]);
    spec.dtypes.assign(problem.dtypes.begin(), problem.dtypes.begin() + count);
    spec.out_dtypes.assign(problem.sums.begin(), problem.sums.begin() + count);
    if (test.units) spec.units.assign(problem.units.begin(), problem.units.begin() + count);
    std::copy_n(problem.keys[rank].begin(), 4, spec.keys);
    spec.divisor = problem.divisor;
    spec.rank = rank;
    spec.tag = tag;
    return std::make_unique<cgx::FusedCall>(std::move(spec), test.settings,
                                            std::make_unique<FakePort>(network, rank), workers,
                                            buffers);
  }

  const Case test;
  const int tag;
  const Problem problem;
  std::vector<Values> outputs, residuals;
};

void run(const std::vector<Case>& cases, const std::string& name, uint32_t seed) {
  std::mt19937 rng(seed);
  Network network(seed + 1);
  cgx::WorkerPool workers(2);
  std::vector<std::unique_ptr<Job>> jobs;
  for (size_t j = 0; j < cases.size(); ++j) {
    jobs.push_back(std::make_unique<Job>(cases[j], static_cast<int>(j) * cgx::kCallTags));
  }
  const std::string wrong = run_in_any_order(
      network, cases[0].world, jobs.size(), rng,
      [&](int64_t rank, size_t job, cgx::BufferPool& buffers) {
        return jobs[job]->start(rank, network, workers, buffers);
      },
      [](const cgx::Call&) {});
  if (!wrong.empty()) return check(false, name + ": " + wrong);
  for (const auto& job : jobs) {
    check(job->outputs == job->problem.expected,
          name + ": every rank holds the bytes of the steps in sequence");
    check(!job->test.residual || job->residuals == job->problem.expected_lost,
          name + ": every rank keeps what the steps in sequence lose");
  }
}

// Per rank, an all-reduce takes the memory of two payloads and a gather-sum that of one, plus a few
// segments.
void memory(Collective collective) {
  Network network(2);
  cgx::WorkerPool workers(2);
  Case c;
  c.world = 4;
  c.leaves = {{int64_t{1} << 20, 4, 512, 0, 0}};
  c.settings = {1 << 14, 4};
  c.collective = collective;
  Job job(c, 0);
  const int64_t payload = (job.gathers() ? 1 : 2) * c.world * job.layout().view().chunk_bytes;
  std::vector<cgx::BufferPool> buffers(c.world);
  const int64_t before = live;
  peak = before;
  std::vector<std::unique_ptr<cgx::FusedCall>> calls;
  for (int64_t r = 0; r < c.world; ++r) {
    calls.push_back(job.start(r, network, workers, buffers[r]));
  }
  check(finish(network, calls), "memory: finishes");
  const int64_t each = (peak - before) / c.world;
  check(each >= payload, "memory: counts the payload");
  check(each <= payload + 8 * c.settings.segment_bytes,
        "memory: " + std::to_string(each) + " bytes for a payload of " + std::to_string(payload));
}

// The last of three ranks runs `others`. First messages arrive in any order, several at once.
void disagreement(const Case& most, const Case& others, const std::string& name, uint32_t seed) {
  Network network(seed);
  cgx::WorkerPool workers(1);
  cgx::BufferPool buffers;
  Job a(most, 0), b(others, 0);
  std::vector<std::unique_ptr<cgx::FusedCall>> calls;
  for (int64_t r = 0; r < 3; ++r) {
    calls.push_back((r < 2 ? a : b).start(r, network, workers, buffers));
  }
  for (int i = 0; i < 100; ++i) {
    while (network.deliver()) continue;
    for (auto& call : calls) call->advance();
  }
  for (const auto& call : calls) {
    check(has(call->error(), "is in another call"), name + " are refused");
    check(has(call->error(), "no gradient was sent"),
          name + " are refused before anything is sent");
  }
  check(!network.mismatched, name + ": no payload met one of another length");
}

// Rank 2 of three stops in the middle; the others name it and never end.
void lost_peer(Collective collective, uint32_t seed) {
  Network network(seed);
  cgx::WorkerPool workers(1);
  cgx::BufferPool buffers[3];
  Case c{{{5000, 4, 32, 0, 0}}, DType::kF32, 3, {64, 2}};
  c.collective = collective;
  Job job(c, 0);
  std::vector<std::unique_ptr<cgx::FusedCall>> calls;
  for (int64_t r = 0; r < 3; ++r) calls.push_back(job.start(r, network, workers, buffers[r]));
  for (int i = 0; i < 2000; ++i) {
    for (int64_t r = 0; r < (i < 60 ? 3 : 2); ++r) calls[r]->advance();
    while (network.chance(2) && network.deliver()) continue;
  }
  for (int64_t r = 0; r < 2; ++r) {
    const std::string awaited = calls[r]->awaited();
    check(!calls[r]->done() && calls[r]->error().empty(), "a call without a peer never ends");
    check(has(awaited, "rank 2 (") && has(awaited, "segments received"),
          "names the lost peer: " + awaited);
    // The survivors of a gather-sum have received all of each other's segments.
    if (job.gathers()) check(awaited.find("rank 2 (") == 0, "awaits no other: " + awaited);
  }
}

void sweep(Collective collective, const std::vector<int64_t>& worlds, uint32_t seed) {
  const std::string name = collective == Collective::kGatherSum ? "gather-sum, " : "all-reduce, ";
  for (int64_t world : worlds) {
    for (int64_t segment : {64, 3000, 1 << 20}) {
      for (int64_t bits : {1, 4, 8}) {
        if (world == 64 && (segment == 64 || bits == 8)) continue;  // minutes of messages
        Case c;
        c.collective = collective;
        c.world = world;
        c.settings = {segment, 2 + bits % 3};
        c.units = segment == 3000;
        c.in_place = collective == Collective::kAllReduce && (bits == 4) == (segment == 64);
        c.dtype = bits == 1 ? DType::kBF16 : DType::kF32;
        c.leaves = {{20 * 512 + 33, bits, 512, bits == 4, 0},
                    {0, bits, 32, 0, 1},
                    {1, 8, 32, 0, 2},
                    {4097, 3, 96, 1, 3},
                    {1300, bits, 256, bits == 1 ? 0 : 2, 4, 1, bits == 4 ? 0 : 20}};
        run({c},
            name + "world " + std::to_string(world) + " segment " + std::to_string(segment) +
                " bits " + std::to_string(bits),
            seed++);
      }
    }
    for (const int64_t size : {100, 0}) {  // fewer records than ranks
      Case few;
      few.collective = collective;
      few.world = world;
      few.leaves = {{size, 4, 64, 0, 0}};
      run({few}, name + std::to_string(size) + " values, world " + std::to_string(world), seed++);
    }
  }
}

}  // namespace

int main() {
  sweep(Collective::kAllReduce, {1, 2, 3, 4, 7, 8, 64}, 1);
  sweep(Collective::kGatherSum, {1, 2, 3}, 1001);
  if (!kHalfOfTheCases) sweep(Collective::kGatherSum, {4, 7}, 1501);
  uint32_t seed = 2001;
  std::vector<Case> many(50);
  for (size_t j = 0; j < many.size(); ++j) {
    many[j].world = 4;
    many[j].settings = {512, 3};
    many[j].residual = j % 2 == 1;
    if (j % 3 == 1) many[j].collective = Collective::kGatherSum;
    many[j].leaves = {{static_cast<int64_t>(300 + 97 * j), 4, 64, 0, 0}};
  }
  for (int i = 0; i < 5; ++i) run(many, "50 calls at once in any order", seed++);
  const Case four{{{5000, 4, 512, 0, 0}}, DType::kF32, 3};
  Case eight = four, once = four;
  eight.leaves[0].bits = 8;
  once.collective = Collective::kGatherSum;
  for (uint32_t s = 1; s <= 20; ++s) {
    disagreement(four, eight, "other widths", s);
    disagreement(four, once, "a gather-sum beside all-reduces", s);
    disagreement(once, four, "an all-reduce beside gather-sums", s);
  }
  for (const Collective collective : {Collective::kAllReduce, Collective::kGatherSum}) {
    memory(collective);
    for (uint32_t s = 1; s <= 5; ++s) lost_peer(collective, s);
  }
  return report();
}
