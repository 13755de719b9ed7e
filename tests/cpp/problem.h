// A call of every rank, and its expected results: those of the steps of the xla exchange on the CPU
// kernels, one after the other.
#ifndef CGX_TESTS_PROBLEM_H_
#define CGX_TESTS_PROBLEM_H_

#include <algorithm>
#include <utility>

#include "cases.h"
#include "cpu/kernels.h"
#include "schedule/schedule.h"

namespace {

using Bytes = std::vector<uint8_t>;
using Values = std::vector<Bytes>;  // of leaves

std::vector<void*> pointers(const Values& leaves) {
  std::vector<void*> all;
  for (const auto& leaf : leaves) all.push_back(const_cast<uint8_t*>(leaf.data()));
  return all;
}

// Leaves as kernels take them, from number `first` on.
struct View {
  std::vector<void*> data;
  const cgx::DType* dtypes;

  View(const Values& leaves, const std::vector<cgx::DType>& dtypes, size_t first = 0)
      : data(pointers(leaves)), dtypes(dtypes.data()) {
    data.erase(data.begin(), data.begin() + first);
  }
  cgx::LeavesIn in() const { return {data.data(), dtypes}; }
  cgx::LeavesOut out() const { return {data.data(), dtypes}; }
};

// A collective of leaves of given sizes over `world` ranks.
struct Problem {
  const cgx::KernelTable& cpu = cgx::current_kernels();
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
          bool zeros = true, bool in_units = false, uint32_t seed = 5)
      : collective(collective),
        residual(residual),
        world(world),
        divisor(divisor),
        rows_in(collective == cgx::Collective::kReduceScatter ? world : 1),
        rows_out(collective == cgx::Collective::kAllGather ? world : 1),
        specs(std::move(leaves)),
        keys(world) {
    const int64_t rows = collective == cgx::Collective::kAllReduce ? 1 : world;
    std::mt19937 rng(seed);
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
    std::vector<Bytes> sent(world, Bytes(world * bytes));
    std::vector<float> scratch(owned.scratch_values());
    for (int64_t r = 0; r < world; ++r) {
      const View leaves(in[r], dtypes), lost(expected_lost[r], dtypes);
      cpu.encode({layout, leaves.in(), lost.out(), keys[r].data(), r, sent[r].data(),
                  scratch.data(), all_units()},
                 0, total);
    }
    Bytes gathered(world * bytes), received(world * bytes);
    for (int64_t r = 0; r < world; ++r) {
      for (int64_t from = 0; from < world; ++from) {
        std::copy_n(sent[from].data() + r * bytes, bytes, received.data() + from * bytes);
      }
      const View leaves(in[r], dtypes), lost(expected_lost[r], dtypes);
      cpu.reduce({layout, leaves.in(), keys[r].data() + 2, r, received.data(), divisor,
                  gathered.data() + r * bytes, scratch.data(), lost.out(), all_units()},
                 layout.begin[r], layout.begin[r + 1]);
    }
    Values out = empty(1, dtypes);
    const View decoded(out, dtypes);
    cpu.decode({layout, gathered.data(), decoded.out(), scratch.data(), all_units()}, 0, total);
    return std::vector<Values>(world, out);
  }

  // A rank's leaves of row `from`, encoded separately.
  Bytes encoded(int64_t rank, int64_t from, Values* residuals = nullptr) const {
    const cgx::Layout layout = row.view();
    const View leaves(in[rank], dtypes, from * specs.size());
    const View lost(residuals ? *residuals : in[rank], dtypes);
    Bytes payload(layout.chunk_bytes);
    std::vector<float> scratch(row.scratch_values());
    cpu.encode({layout, leaves.in(), residuals ? lost.out() : cgx::LeavesOut{},
                keys[rank].data() + 2 * from, -1, payload.data(), scratch.data(), all_units()},
               0, layout.total_bytes());
    return payload;
  }

  // (leaves + decoded payloads of all ranks except `but`) / divisor.
  Values sum(const View& leaves, const Bytes& payloads, int64_t but) const {
    const cgx::Layout layout = row.view();
    std::vector<float> scratch(row.scratch_values());
    Values total = empty(1, sums);
    const View out(total, sums);
    cpu.accumulate(
        {layout, leaves.in(), payloads.data(), world, but, divisor, out.out(), scratch.data()}, 0,
        layout.total_bytes());
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
      totals.push_back(sum(View(in[r], sums, r * specs.size()), received, r));
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
    return std::vector<Values>(world, sum(View(zeros, sums), gathered, -1));
  }

  // Encode, all_gather, decode every row.
  std::vector<Values> all_gather_in_steps() const {
    const cgx::Layout layout = row.view();
    Values out = empty(world, dtypes);
    std::vector<float> scratch(row.scratch_values());
    for (int64_t r = 0; r < world; ++r) {
      const View leaves(out, dtypes, r * specs.size());
      cpu.decode({layout, encoded(r, 0).data(), leaves.out(), scratch.data()}, 0,
                 layout.total_bytes());
    }
    return std::vector<Values>(world, out);
  }
};

}  // namespace

#endif  // CGX_TESTS_PROBLEM_H_
