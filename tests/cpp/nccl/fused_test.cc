// The fused calls on CUDA, all ranks in this process: their own schedule, streams and kernels on
// emulated streams whose order a seed chooses. Against the steps of the xla exchange on the CPU
// kernels, byte for byte.
#include "nccl/fused.h"

#include <algorithm>
#include <cmath>

#include "cases.h"
#include "cpu/kernels.h"

namespace {

using Bytes = std::vector<uint8_t>;
using Values = std::vector<std::vector<float>>;

cgx::NcclLibrary& emulated_nccl() {
  static cgx::NcclLibrary library = [] {
    cgx::NcclLibrary l = {};
    l.get_error_string = [](int) { return "internal error"; };
    l.group_start = emulator::group_start;
    l.group_end = emulator::group_end;
    l.send = [](const void* data, size_t count, int, int peer, cgx::NcclComm comm,
                cudaStream_t stream) {
      return emulator::send(data, count, peer, reinterpret_cast<emulator::Comm*>(comm), stream);
    };
    l.recv = [](void* data, size_t count, int, int peer, cgx::NcclComm comm, cudaStream_t stream) {
      return emulator::recv(data, count, peer, reinterpret_cast<emulator::Comm*>(comm), stream);
    };
    return l;
  }();
  return library;
}

// An all-reduce, or one half of it, of leaves of given sizes over `world` ranks.
struct Problem {
  std::chrono::milliseconds patience = std::chrono::seconds(60);
  cgx::Collective collective;
  bool residual;
  int64_t world;
  float divisor;
  int64_t rows_in, rows_out;  // of the leaves, in a rank's memory
  std::vector<cgx::SlotSpec> specs;
  std::vector<Values> in;                   // by rank, row and leaf
  std::vector<std::vector<uint32_t>> keys;  // by rank
  std::vector<cgx::DType> dtypes;           // of all rows
  cgx::OwnedLayout row, owned;              // of one row; of all that travel together
  std::vector<Values> expected, expected_lost;

  Problem(cgx::Collective collective, std::vector<cgx::SlotSpec> leaves, int64_t world,
          float divisor, bool residual = false)
      : collective(collective),
        residual(residual),
        world(world),
        divisor(divisor),
        rows_in(collective == cgx::Collective::kReduceScatter ? world : 1),
        rows_out(collective == cgx::Collective::kAllGather ? world : 1),
        specs(std::move(leaves)),
        in(world),
        keys(world) {
    std::mt19937 rng(5);
    std::normal_distribution<float> normal;
    for (int64_t r = 0; r < world; ++r) {
      in[r] = empty(rows_in);
      for (auto& leaf : in[r]) {
        for (float& x : leaf) x = normal(rng);
      }
      for (int64_t k = 0; k < 2 * world + 2; ++k) keys[r].push_back(rng());
    }
    std::vector<cgx::SlotSpec> all;
    for (int64_t r = 0; r < std::max(rows_in, rows_out); ++r) {
      all.insert(all.end(), specs.begin(), specs.end());
    }
    dtypes.assign(all.size(), cgx::DType::kF32);
    check(row.build(specs, 1).empty() && owned.build(all, world).empty(), "layout");
    if (collective == cgx::Collective::kAllReduce) expected = all_reduce_in_steps();
    if (collective == cgx::Collective::kReduceScatter) expected = reduce_scatter_in_steps();
    if (collective == cgx::Collective::kAllGather) expected = all_gather_in_steps();
  }

  static std::vector<void*> pointers(const Values& leaves) {
    std::vector<void*> all;
    for (const auto& leaf : leaves) all.push_back(const_cast<float*>(leaf.data()));
    return all;
  }

  // The same with one row, which stands for every one.
  std::vector<void*> pointers_of_rows(const Values& leaves) const {
    std::vector<void*> all = pointers(leaves);
    while (all.size() < dtypes.size()) all.push_back(all[all.size() - specs.size()]);
    return all;
  }

  Values empty(int64_t rows) const {
    Values leaves;
    for (int64_t r = 0; r < rows; ++r) {
      for (const auto& leaf : specs) leaves.emplace_back(leaf.size, NAN);
    }
    return leaves;
  }

  // Encode, all_to_all, reduce, all_gather and decode, one after the other.
  std::vector<Values> all_reduce_in_steps() {
    const cgx::Layout layout = owned.view();
    const int64_t bytes = layout.chunk_bytes, total = layout.total_bytes();
    const cgx::KernelTable& cpu = cgx::current_kernels();
    std::vector<Bytes> sent(world, Bytes(world * bytes));
    std::vector<float> scratch(owned.longest_bucket());
    expected_lost.assign(world, empty(1));
    for (int64_t r = 0; r < world; ++r) {
      const auto leaves = pointers(in[r]), lost = pointers(expected_lost[r]);
      cpu.encode({layout,
                  {leaves.data(), dtypes.data()},
                  {lost.data(), dtypes.data()},
                  keys[r].data(),
                  r,
                  sent[r].data(),
                  scratch.data()},
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
                  {lost.data(), dtypes.data()}},
                 layout.begin[r], layout.begin[r + 1]);
    }
    Values out = empty(1);
    const auto leaves = pointers(out);
    cpu.decode({layout, gathered.data(), {leaves.data(), dtypes.data()}, scratch.data()}, 0, total);
    return std::vector<Values>(world, out);
  }

  // A rank's leaves of row `from`, encoded by themselves.
  Bytes encoded(int64_t rank, int64_t from) const {
    const cgx::Layout layout = row.view();
    const auto leaves = pointers(in[rank]);
    Bytes payload(layout.chunk_bytes);
    std::vector<float> scratch(row.longest_bucket());
    cgx::current_kernels().encode({layout,
                                   {leaves.data() + from * specs.size(), dtypes.data()},
                                   {},
                                   keys[rank].data() + 2 * from,
                                   -1,
                                   payload.data(),
                                   scratch.data()},
                                  0, layout.total_bytes());
    return payload;
  }

  // Encode every row, all_to_all, accumulate.
  std::vector<Values> reduce_scatter_in_steps() const {
    const cgx::Layout layout = row.view();
    std::vector<Values> sums;
    std::vector<float> scratch(row.longest_bucket());
    for (int64_t r = 0; r < world; ++r) {
      Bytes received;
      for (int64_t from = 0; from < world; ++from) {
        const Bytes payload = encoded(from, r);
        received.insert(received.end(), payload.begin(), payload.end());
      }
      sums.push_back(empty(1));
      const auto leaves = pointers(in[r]), out = pointers(sums[r]);
      cgx::current_kernels().accumulate({layout,
                                         {leaves.data() + r * specs.size(), dtypes.data()},
                                         received.data(),
                                         world,
                                         r,
                                         divisor,
                                         {out.data(), dtypes.data()},
                                         scratch.data()},
                                        0, layout.total_bytes());
    }
    return sums;
  }

  // Encode, all_gather, decode every row.
  std::vector<Values> all_gather_in_steps() const {
    const cgx::Layout layout = row.view();
    Values out = empty(world);
    const auto leaves = pointers(out);
    std::vector<float> scratch(row.longest_bucket());
    for (int64_t r = 0; r < world; ++r) {
      cgx::current_kernels().decode({layout,
                                     encoded(r, 0).data(),
                                     {leaves.data() + r * specs.size(), dtypes.data()},
                                     scratch.data()},
                                    0, layout.total_bytes());
    }
    return std::vector<Values>(world, out);
  }

  struct Outcome {
    bool finished = true;
    std::string error;
    std::vector<Values> out, lost;
  };

  // All ranks' fused calls, `calls` one after the other on the same streams and memory; the order
  // of streams follows the seed.
  Outcome fused(int64_t segment_bytes, uint64_t seed, int64_t left_out = -1, int calls = 1,
                int64_t failing = -1) const {
    emulator::reset();
    emulator::leave_out(left_out);
    emulator::fail_at(failing);
    const cgx::Layout layout = owned.view();
    Outcome outcome;
    std::vector<Bytes> scratch(world);
    std::vector<emulator::Comm> comms(world);
    std::vector<cgx::CudaLane> lanes(world);
    std::vector<cudaStream_t> streams(world);
    std::vector<std::vector<void*>> from(world), to(world), lost(world);
    const int64_t bytes = cgx::CudaFused::scratch_bytes(collective, layout, segment_bytes);
    outcome.out.assign(world, empty(rows_out));
    outcome.lost.assign(world, empty(1));
    for (int64_t r = 0; r < world; ++r) {
      scratch[r].assign(bytes, 0xCD);
      comms[r] = {static_cast<int>(r), static_cast<int>(world)};
      from[r] = pointers_of_rows(in[r]);
      to[r] = pointers_of_rows(outcome.out[r]);
      lost[r] = pointers(outcome.lost[r]);
      streams[r] = emulator::create_stream();
      check(lanes[r].prepare(cgx::CudaFused::segments(layout, segment_bytes)).empty(), "lane");
    }
    for (int64_t r = 0; r < world; ++r) {
      for (int call = 0; call < calls; ++call) {
        cgx::CudaFused fused({collective,
                              layout,
                              {from[r].data(), dtypes.data()},
                              {to[r].data(), dtypes.data()},
                              {residual ? lost[r].data() : nullptr, dtypes.data()},
                              keys[r].data(),
                              divisor,
                              static_cast<int32_t>(r),
                              segment_bytes,
                              scratch[r].data(),
                              patience},
                             emulated_nccl(), reinterpret_cast<cgx::NcclComm>(&comms[r]), lanes[r],
                             streams[r]);
        const std::string error = fused.run();
        if (!error.empty()) outcome.error = error;
      }
    }
    check(emulator::late() == 0, "nothing is made between messages");
    if (outcome.error.empty()) outcome.finished = emulator::run_streams(seed);
    return outcome;
  }

  static bool same(const Values& a, const Values& b) {
    for (size_t k = 0; k < a.size(); ++k) {
      if (std::memcmp(a[k].data(), b[k].data(), 4 * a[k].size()) != 0) return false;
    }
    return true;
  }

  bool right(const Outcome& outcome) const {
    for (int64_t r = 0; r < world; ++r) {
      if (!same(expected[r], outcome.out[r])) return false;
      if (residual && !same(expected_lost[r], outcome.lost[r])) return false;
    }
    return outcome.finished && outcome.error.empty();
  }
};

const struct {
  cgx::Collective collective;
  std::string name;
  bool residual;
} kCollectives[] = {{cgx::Collective::kAllReduce, "all-reduce", false},
                    {cgx::Collective::kAllReduce, "all-reduce with residuals", true},
                    {cgx::Collective::kReduceScatter, "reduce-scatter", false},
                    {cgx::Collective::kAllGather, "all-gather", false}};

// Of an all-reduce; the halves have them once for every rank, so shorter ones do.
std::vector<cgx::SlotSpec> leaves(cgx::Collective collective, int64_t rounding) {
  const int64_t size = collective == cgx::Collective::kAllReduce ? 777 : 177;
  return {{size + 223, 4, 64, rounding, 0}, {3, 8, 32, 0, 1, 1}, {size, 3, 96, rounding, 2}};
}

void equals_the_steps() {
  for (const auto& [collective, name, residual] : kCollectives) {
    for (const int64_t world : {1, 2, 3, 4, 8}) {
      for (const int64_t rounding : {0, 2}) {
        const Problem problem(collective, leaves(collective, rounding), world,
                              static_cast<float>(world), residual);
        for (const int64_t segment_bytes : {1, 40, 100, 1 << 20}) {
          for (uint64_t seed = 1; seed <= 2; ++seed) {
            check(problem.right(problem.fused(segment_bytes, seed, -1, 2)),
                  name + " of world " + std::to_string(world) + " segments of " +
                      std::to_string(segment_bytes) + " seed " + std::to_string(seed));
          }
        }
      }
    }
    // Fewer records than ranks: some chunks are empty, and their segments are no messages.
    const Problem few(collective, {{40, 2, 32, 0, 0}}, 8, 1.0f, residual);
    check(few.right(few.fused(1 << 20, 1)), name + " of fewer records than ranks");
  }
}

// Every single wait is needed: without it some order of the streams gives a wrong result.
void every_wait_is_needed() {
  for (const auto& [collective, name, residual] : kCollectives) {
    const bool whole = collective == cgx::Collective::kAllReduce;
    for (const int64_t world : {2, 3}) {
      if (residual && world > 2) continue;  // its waits are those of the one without
      // Every segment is a record, four a chunk and more.
      const Problem problem(collective, {{whole ? 768 : 256, 4, 64, 0, 0}}, world, 1.0f, residual);
      const int64_t segment_bytes = 45;
      check(problem.right(problem.fused(segment_bytes, 2)), name + ": all waits");
      const int64_t count = emulator::waits();
      check(count >= (whole ? 4 : 2) * 4 * world, name + ": several segments");
      for (int64_t wait = 0; wait < count; ++wait) {
        bool caught = false;
        for (uint64_t seed = 1; seed <= 60 && !caught; ++seed) {
          caught = !problem.right(problem.fused(segment_bytes, seed, wait));
        }
        check(caught, name + " of world " + std::to_string(world) + ": nothing misses wait " +
                          std::to_string(wait) + " of " + std::to_string(count));
      }
    }
  }
}

// A communicator that does not block is asked until its messages are on the stream.
void waits_for_communicators_that_do_not_block() {
  static int pending = 0, asked = 0;
  const auto collective = cgx::Collective::kAllReduce;
  const Problem problem(collective, leaves(collective, 0), 2, 1.0f);
  cgx::NcclLibrary& nccl = emulated_nccl();
  const cgx::NcclLibrary blocking = nccl;
  nccl.group_end = [] {
    pending = 3;
    return emulator::group_end() == 0 ? cgx::NcclLibrary::kInProgress : 1;
  };
  nccl.comm_get_async_error = [](cgx::NcclComm, int* state) {
    ++asked;
    *state = pending-- > 0 ? cgx::NcclLibrary::kInProgress : cgx::NcclLibrary::kSuccess;
    return cgx::NcclLibrary::kSuccess;
  };
  check(problem.right(problem.fused(100, 1)), "a communicator that does not block");
  check(asked > 0 && asked % 4 == 0, "is asked until it is done");
  nccl = blocking;
}

// Neither a communicator that never gets done nor one that was aborted is asked for ever.
void gives_up_on_communicators() {
  const auto collective = cgx::Collective::kAllReduce;
  Problem problem(collective, leaves(collective, 0), 2, 1.0f);
  problem.patience = std::chrono::milliseconds(20);
  cgx::NcclLibrary& nccl = emulated_nccl();
  const cgx::NcclLibrary blocking = nccl;
  nccl.group_end = [] {
    emulator::group_end();
    return cgx::NcclLibrary::kInProgress;
  };
  nccl.comm_get_async_error = [](cgx::NcclComm, int* state) {
    *state = cgx::NcclLibrary::kInProgress;
    return cgx::NcclLibrary::kSuccess;
  };
  const std::string late = problem.fused(100, 1).error;
  check(late.find("still in progress after 20 ms: a rank has not come") != late.npos,
        "a communicator that never gets done: " + late);
  nccl.comm_get_async_error = [](cgx::NcclComm, int* state) {
    *state = 6;  // ncclRemoteError
    return cgx::NcclLibrary::kSuccess;
  };
  check(problem.fused(100, 1).error == "ncclGroupEnd: internal error", "an aborted communicator");
  nccl.comm_get_async_error = [](cgx::NcclComm, int*) { return 4; };  // ncclInvalidArgument
  check(problem.fused(100, 1).error == "ncclGroupEnd: internal error", "one that is no more");
  nccl = blocking;
}

// Whatever NCCL call fails, the error names it, no group stays open, and the caller's stream still
// comes after the wire.
void failures_are_named() {
  for (const auto& [collective, name, residual] : kCollectives) {
    const Problem problem(collective, {{600, 4, 64, 0, 0}}, 2, 1.0f, residual);
    for (int64_t call = 0; call < 16; ++call) {
      const auto outcome = problem.fused(45, 1, -1, 1, call);
      const char* const names[] = {"ncclGroupStart", "ncclSend", "ncclRecv", "ncclGroupEnd"};
      check(outcome.error == std::string(names[call % 4]) + ": internal error",
            name + ": failing call " + std::to_string(call) + ": " + outcome.error);
    }
  }
}

// The sizes that cgx_jax/exchanges/nccl.py computes, in tests/test_halves.py.
void payload_memory() {
  const struct {
    cgx::Collective collective;
    int64_t size, bytes;
  } cases[] = {{cgx::Collective::kAllReduce, 2048 * 2048, 4'327'424},
               {cgx::Collective::kAllReduce, 25'000'000, 25'788'416},
               {cgx::Collective::kReduceScatter, 25'000'000 / 8, 25'786'368},
               {cgx::Collective::kAllGather, 25'000'000 / 8, 12'893'184}};
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
  every_wait_is_needed();
  waits_for_communicators_that_do_not_block();
  gives_up_on_communicators();
  failures_are_named();
  return report();
}
