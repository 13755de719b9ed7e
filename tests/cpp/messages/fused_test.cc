// The fused all-reduce and gather-sum of virtual ranks, over messages that are delayed at random.
// They give the same bytes as the kernels and the exchanges between them, run one after the other.
#include "messages/fused.h"

#include <algorithm>

#include "cases.h"
#include "counted_memory.h"
#include "messages/network.h"

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

  // In a gather-sum each rank sends its own leaves to all, so they are one chunk.
  bool gathers() const { return collective == Collective::kGatherSum; }
  int64_t chunks() const { return gathers() ? 1 : world; }
  bool in_units(size_t leaf) const { return units && leaf % 2 == 0; }
  std::vector<DType> in_dtypes() const { return std::vector<DType>(leaves.size(), dtype); }
  // Sums that are still in their units are fp32.
  std::vector<DType> out_dtypes() const {
    std::vector<DType> all = in_dtypes();
    for (size_t k = 0; k < all.size() && gathers(); ++k) {
      if (in_units(k)) all[k] = DType::kF32;
    }
    return all;
  }
};

// One call on every rank: its leaves, its results, and the results of the steps in sequence.
struct Job {
  using Leaves = std::vector<std::vector<char>>;

  explicit Job(const Case& c, int tag, std::mt19937& rng) : test(c), tag(tag) {
    std::normal_distribution<float> normal;
    const int64_t item = cgx::item_size(c.dtype);
    for (int64_t r = 0; r < c.world; ++r) {
      auto& in = inputs.emplace_back();
      auto& out = outputs.emplace_back();
      auto& lost = residuals.emplace_back();
      const auto to = c.out_dtypes();
      for (size_t k = 0; k < c.leaves.size(); ++k) {
        const auto& leaf = c.leaves[k];
        in.emplace_back(leaf.size * item);
        out.emplace_back(leaf.size * cgx::item_size(to[k]), char{7});
        lost.emplace_back(leaf.size * item, char{7});
        for (int64_t i = 0; i < leaf.size; ++i) {
          const float x = normal(rng);
          std::memcpy(in.back().data() + i * item, reinterpret_cast<const char*>(&x) + 4 - item,
                      item);
        }
        plant_zeros(leaf, c.dtype, rng, in.back().data());
        if (c.in_place) out.back() = in.back();
      }
    }
  }
  // Every other leaf has units, with as many rows as it has values.
  std::vector<cgx::LeafUnits> units() const {
    std::vector<cgx::LeafUnits> all(test.units ? test.leaves.size() : 0);
    for (size_t k = 0; k < all.size(); ++k) {
      if (!test.in_units(k)) continue;
      all[k] = {factors.data(), factors.data(), 1, test.leaves[k].size};
    }
    return all;
  }
  uint32_t key(int64_t rank, int phase, int word) const {
    return static_cast<uint32_t>(rank * 4 + phase * 2 + word + 1);
  }
  std::unique_ptr<cgx::FusedCall> start(int64_t rank, Network& network, cgx::WorkerPool& workers,
                                        cgx::BufferPool& buffers) {
    cgx::FusedSpec spec;
    spec.collective = test.collective;
    spec.world = test.world;
    spec.owned.build(test.leaves, test.chunks());
    for (size_t k = 0; k < test.leaves.size(); ++k) {
      spec.out.push_back(outputs[rank][k].data());
      spec.in.push_back(test.in_place ? spec.out.back() : inputs[rank][k].data());
      if (test.residual) spec.residuals.push_back(residuals[rank][k].data());
    }
    spec.dtypes = test.in_dtypes();
    spec.out_dtypes = test.out_dtypes();
    spec.units = units();
    for (int i = 0; i < 4; ++i) spec.keys[i] = key(rank, i / 2, i % 2);
    spec.divisor = 3.0f;
    spec.rank = rank;
    spec.tag = tag;
    return std::make_unique<cgx::FusedCall>(std::move(spec), test.settings,
                                            std::make_unique<FakePort>(network, rank), workers,
                                            buffers);
  }
  template <typename Arrays>
  static std::vector<void*> pointers(const Arrays& arrays) {
    std::vector<void*> all;
    for (const auto& a : arrays) all.push_back(const_cast<char*>(a.data()));
    return all;
  }
  // The same reduction, one phase after the other: what every rank gets, and each rank's residuals.
  std::pair<Leaves, std::vector<Leaves>> expected() const {
    return test.gathers() ? expected_of_gather_sum() : expected_of_all_reduce();
  }
  std::pair<Leaves, std::vector<Leaves>> expected_of_gather_sum() const {
    const auto& kernels = cgx::current_kernels();
    cgx::OwnedLayout owned;
    owned.build(test.leaves, 1);
    const cgx::Layout layout = owned.view();
    const int64_t row = layout.total_bytes();
    const auto from = test.in_dtypes(), to = test.out_dtypes();
    const auto of_units = units();
    const cgx::LeafUnits* const each = of_units.empty() ? nullptr : of_units.data();
    std::vector<Leaves> lost_by(residuals);
    std::vector<uint8_t> rows(test.world * row + 1);
    std::vector<float> scratch(owned.scratch_values());
    for (int64_t r = 0; r < test.world; ++r) {
      const uint32_t k[2] = {key(r, 0, 0), key(r, 0, 1)};
      const auto in = pointers(inputs[r]), lost = pointers(lost_by[r]);
      const cgx::LeavesOut errors{lost.data(), from.data()};
      uint8_t* const payload = rows.data() + r * row;
      kernels.encode(
          {layout, {in.data(), from.data()}, errors, k, -1, payload, scratch.data(), each}, 0, row);
    }
    Leaves out(outputs[0]), zeros(outputs[0]);
    for (auto& leaf : zeros) std::fill(leaf.begin(), leaf.end(), char{0});
    const auto sums = pointers(out), none = pointers(zeros);
    kernels.accumulate({layout,
                        {none.data(), to.data()},
                        rows.data(),
                        test.world,
                        -1,
                        3.0f,
                        {sums.data(), to.data()},
                        scratch.data()},
                       0, row);
    return {out, lost_by};
  }
  std::pair<Leaves, std::vector<Leaves>> expected_of_all_reduce() const {
    const auto& kernels = cgx::current_kernels();
    cgx::OwnedLayout owned;
    owned.build(test.leaves, test.world);
    const cgx::Layout layout = owned.view();
    const int64_t row = layout.chunk_bytes, world = test.world;
    const auto dtypes = test.in_dtypes();
    const auto of_units = units();
    const cgx::LeafUnits* const each = of_units.empty() ? nullptr : of_units.data();
    std::vector<Leaves> lost_by(residuals);
    std::vector<std::vector<uint8_t>> sent(world, std::vector<uint8_t>(world * row + 1));
    std::vector<float> scratch(owned.scratch_values());
    for (int64_t r = 0; r < world; ++r) {
      const uint32_t k[2] = {key(r, 0, 0), key(r, 0, 1)};
      const auto in = pointers(inputs[r]), lost = pointers(lost_by[r]);
      kernels.encode({layout,
                      {in.data(), dtypes.data()},
                      {lost.data(), dtypes.data()},
                      k,
                      r,
                      sent[r].data(),
                      scratch.data(),
                      each},
                     0, layout.total_bytes());
    }
    std::vector<uint8_t> gathered(world * row + 1), received(world * row + 1);
    for (int64_t r = 0; r < world; ++r) {
      for (int64_t p = 0; p < world; ++p) {
        std::memcpy(received.data() + p * row, sent[p].data() + r * row, row);
      }
      const uint32_t k[2] = {key(r, 1, 0), key(r, 1, 1)};
      const auto in = pointers(inputs[r]), lost = pointers(lost_by[r]);
      kernels.reduce({layout,
                      {in.data(), dtypes.data()},
                      k,
                      r,
                      received.data(),
                      3.0f,
                      gathered.data() + r * row,
                      scratch.data(),
                      {lost.data(), dtypes.data()},
                      each},
                     layout.begin[r], layout.begin[r + 1]);
    }
    auto out = outputs[0];
    const auto to = pointers(out);
    kernels.decode({layout, gathered.data(), {to.data(), dtypes.data()}, scratch.data(), each}, 0,
                   layout.total_bytes());
    return {out, lost_by};
  }

  const Case test;
  const int tag;
  std::vector<Leaves> inputs, outputs, residuals;
  const std::vector<float> factors = std::vector<float>(40000, 1.7f);
};

// Every rank starts the calls in its own order. Then messages and ranks advance at random.
void run(const std::vector<Case>& cases, const std::string& name, uint32_t seed) {
  std::mt19937 rng(seed);
  Network network(seed + 1);
  cgx::WorkerPool workers(2);
  const int64_t world = cases[0].world;
  std::vector<cgx::BufferPool> buffers(world);
  std::vector<std::unique_ptr<Job>> jobs;
  for (size_t j = 0; j < cases.size(); ++j) {
    jobs.push_back(std::make_unique<Job>(cases[j], static_cast<int>(j) * cgx::kCallTags, rng));
  }
  std::vector<std::vector<std::unique_ptr<cgx::FusedCall>>> active(world);
  std::vector<std::vector<size_t>> waiting(world);
  for (auto& order : waiting) {
    for (size_t j = 0; j < jobs.size(); ++j) order.push_back(j);
    std::shuffle(order.begin(), order.end(), rng);
  }
  int64_t idle = 0, left = world * jobs.size();
  while (left > 0 && idle < 100000) {
    ++idle;
    if (rng() % 2 && network.deliver()) idle = 0;
    const int64_t r = rng() % world;
    if (!waiting[r].empty() && rng() % 3 == 0) {
      active[r].push_back(jobs[waiting[r].back()]->start(r, network, workers, buffers[r]));
      waiting[r].pop_back();
    }
    for (size_t i = 0; i < active[r].size(); ++i) {
      if (active[r][i]->advance()) idle = 0;
      if (!active[r][i]->error().empty()) {
        check(false, name + ": " + active[r][i]->error());
        return;
      }
      if (!active[r][i]->done()) continue;
      active[r][i]->release(buffers[r]);
      active[r].erase(active[r].begin() + i--);
      --left;
    }
  }
  check(left == 0, name + ": finishes");
  check(network.empty() && !network.mismatched, name + ": every message is sent and received once");
  for (const auto& job : jobs) {
    const auto [want, lost] = job->expected();
    bool same = true;
    for (const auto& out : job->outputs) same &= out == want;
    check(same, name + ": every rank holds the bytes of the steps in sequence");
    if (job->test.residual) {
      check(job->residuals == lost, name + ": every rank keeps what the steps in sequence lose");
    }
  }
}

// Per rank, an all-reduce takes the memory of two payloads and a gather-sum that of one, plus a few
// segments.
void memory(Collective collective) {
  std::mt19937 rng(1);
  Network network(2);
  cgx::WorkerPool workers(2);
  Case c;
  c.world = 4;
  c.leaves = {{int64_t{1} << 20, 4, 512, 0, 0}};
  c.settings = {1 << 14, 4};
  c.collective = collective;
  Job job(c, 0, rng);
  cgx::OwnedLayout owned;
  owned.build(c.leaves, c.chunks());
  const int64_t payload = (c.gathers() ? 1 : 2) * c.world * owned.view().chunk_bytes;
  std::vector<cgx::BufferPool> buffers(c.world);
  const int64_t before = live;
  peak = before;
  std::vector<std::unique_ptr<cgx::FusedCall>> calls;
  for (int64_t r = 0; r < c.world; ++r) {
    calls.push_back(job.start(r, network, workers, buffers[r]));
  }
  const auto done = [](const auto& call) { return call->done(); };
  for (int i = 0; i < 1000000 && !std::all_of(calls.begin(), calls.end(), done); ++i) {
    network.deliver();
    for (auto& call : calls) call->advance();
  }
  check(std::all_of(calls.begin(), calls.end(), done), "memory: finishes");
  const int64_t each = (peak - before) / c.world;
  check(each >= payload, "memory: counts the payload");
  check(each <= payload + 8 * c.settings.segment_bytes,
        "memory: " + std::to_string(each) + " bytes for a payload of " + std::to_string(payload));
}

// The last of three ranks runs `others`. First messages arrive in any order, several at once.
void disagreement(const Case& most, const Case& others, const std::string& name, uint32_t seed) {
  std::mt19937 rng(seed);
  Network network(seed);
  cgx::WorkerPool workers(1);
  cgx::BufferPool buffers;
  Job a(most, 0, rng), b(others, 0, rng);
  std::vector<std::unique_ptr<cgx::FusedCall>> calls;
  for (int64_t r = 0; r < 3; ++r) {
    calls.push_back((r < 2 ? a : b).start(r, network, workers, buffers));
  }
  for (int i = 0; i < 100; ++i) {
    while (network.deliver()) continue;
    for (auto& call : calls) call->advance();
  }
  for (const auto& call : calls) {
    check(call->error().find("is in another call") != std::string::npos, name + " are refused");
    check(call->error().find("no gradient was sent") != std::string::npos,
          name + " are refused before anything is sent");
  }
  check(!network.mismatched, name + ": no payload met one of another length");
}

// Rank 2 of three stops in the middle; the others name it and never end.
void lost_peer(Collective collective, uint32_t seed) {
  std::mt19937 rng(seed);
  Network network(seed);
  cgx::WorkerPool workers(1);
  cgx::BufferPool buffers[3];
  Case c{{{5000, 4, 32, 0, 0}}, DType::kF32, 3, {64, 2}};
  c.collective = collective;
  Job job(c, 0, rng);
  std::vector<std::unique_ptr<cgx::FusedCall>> calls;
  for (int64_t r = 0; r < 3; ++r) calls.push_back(job.start(r, network, workers, buffers[r]));
  for (int i = 0; i < 2000; ++i) {
    for (int64_t r = 0; r < (i < 60 ? 3 : 2); ++r) calls[r]->advance();
    while (network.chance(2) && network.deliver()) continue;
  }
  for (int64_t r = 0; r < 2; ++r) {
    const std::string awaited = calls[r]->awaited();
    check(!calls[r]->done() && calls[r]->error().empty(), "a call without a peer never ends");
    check(awaited.find("rank 2 (") != std::string::npos &&
              awaited.find("segments received") != std::string::npos,
          "names the lost peer: " + awaited);
    // The survivors of a gather-sum have received all of each other's segments.
    if (c.gathers()) check(awaited.find("rank 2 (") == 0, "awaits no other: " + awaited);
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
        c.in_place = !c.gathers() && (bits == 4) == (segment == 64);
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
    Case tiny;  // fewer records than ranks
    tiny.collective = collective;
    tiny.world = world;
    tiny.leaves = {{100, 4, 64, 0, 0}};
    run({tiny}, name + "tiny, world " + std::to_string(world), seed++);
    Case none;
    none.collective = collective;
    none.world = world;
    none.leaves = {{0, 4, 64, 0, 0}};
    run({none}, name + "no values, world " + std::to_string(world), seed++);
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
