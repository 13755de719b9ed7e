// The fused all-reduce on CUDA, all ranks in this process: its own schedule, streams and kernels on
// emulated streams whose order a seed chooses. Against the steps of the xla exchange on the CPU
// kernels, byte for byte.
#include "fused_cuda.h"

#include <algorithm>
#include <cmath>

#include "cases.h"

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

// A reduction of leaves of given sizes over `world` ranks.
struct Problem {
  std::vector<cgx::LeafSpec> specs;
  int64_t world;
  float divisor;
  std::vector<Values> in;  // by rank, leaf
  uint32_t keys[4] = {1, 2, 3, 4};
  std::vector<cgx::DType> dtypes;
  cgx::OwnedLayout owned;
  Values expected;

  Problem(std::vector<cgx::LeafSpec> leaves, int64_t world, float divisor)
      : specs(std::move(leaves)),
        world(world),
        divisor(divisor),
        in(world),
        dtypes(specs.size(), cgx::DType::kF32) {
    std::mt19937 rng(5);
    std::normal_distribution<float> normal;
    for (auto& rank : in) {
      for (const auto& leaf : specs) {
        rank.emplace_back(leaf.size);
        for (float& x : rank.back()) x = normal(rng);
      }
    }
    check(owned.build(specs, world).empty(), "layout");
    expected = exchange_in_steps();
  }

  static std::vector<void*> pointers(const Values& leaves) {
    std::vector<void*> all;
    for (const auto& leaf : leaves) all.push_back(const_cast<float*>(leaf.data()));
    return all;
  }

  Values empty() const {
    Values leaves;
    for (const auto& leaf : specs) leaves.emplace_back(leaf.size, NAN);
    return leaves;
  }

  // Encode, all_to_all, reduce, all_gather and decode, one after the other.
  Values exchange_in_steps() const {
    const cgx::Layout layout = owned.view();
    const int64_t row = layout.chunk_bytes, total = layout.total_bytes();
    const cgx::KernelTable& cpu = cgx::current_kernels();
    std::vector<Bytes> sent(world, Bytes(world * row));
    for (int64_t r = 0; r < world; ++r) {
      const auto leaves = pointers(in[r]);
      cpu.encode({layout, {leaves.data(), dtypes.data()}, {}, keys, r, sent[r].data()}, 0, total);
    }
    Bytes gathered(world * row), received(world * row);
    std::vector<float> scratch(owned.longest_bucket());
    for (int64_t r = 0; r < world; ++r) {
      for (int64_t from = 0; from < world; ++from) {
        std::copy_n(&sent[from][r * row], row, &received[from * row]);
      }
      const auto leaves = pointers(in[r]);
      cpu.reduce({layout,
                  {leaves.data(), dtypes.data()},
                  keys + 2,
                  r,
                  received.data(),
                  divisor,
                  &gathered[r * row],
                  scratch.data()},
                 layout.begin[r], layout.begin[r + 1]);
    }
    Values out = empty();
    const auto leaves = pointers(out);
    cpu.decode({layout, gathered.data(), {leaves.data(), dtypes.data()}}, 0, total);
    return out;
  }

  struct Outcome {
    bool finished = true;
    std::string error;
    std::vector<Values> out;
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
    std::vector<std::vector<void*>> from(world), to(world);
    outcome.out.assign(world, empty());
    for (int64_t r = 0; r < world; ++r) {
      scratch[r].assign(cgx::CudaFused::scratch_bytes(layout), 0xCD);
      comms[r] = {static_cast<int>(r), static_cast<int>(world)};
      from[r] = pointers(in[r]);
      to[r] = pointers(outcome.out[r]);
      cudaStream_t stream = emulator::create_stream();
      for (int call = 0; call < calls; ++call) {
        cgx::CudaFused fused({layout,
                              {from[r].data(), dtypes.data()},
                              {to[r].data(), dtypes.data()},
                              keys,
                              divisor,
                              static_cast<int32_t>(r),
                              segment_bytes,
                              scratch[r].data()},
                             emulated_nccl(), reinterpret_cast<cgx::NcclComm>(&comms[r]), lanes[r],
                             stream);
        const std::string error = fused.run();
        if (!error.empty()) outcome.error = error;
      }
    }
    if (outcome.error.empty()) outcome.finished = emulator::run_streams(seed);
    return outcome;
  }

  bool right(const Outcome& outcome) const {
    for (const Values& rank : outcome.out) {
      for (size_t k = 0; k < specs.size(); ++k) {
        if (std::memcmp(rank[k].data(), expected[k].data(), 4 * specs[k].size) != 0) return false;
      }
    }
    return outcome.finished && outcome.error.empty();
  }
};

std::vector<cgx::LeafSpec> leaves(int64_t stochastic) {
  return {{1000, 4, 64, stochastic, 0}, {3, 8, 32, 0, 1}, {777, 3, 96, stochastic, 2}};
}

void equals_the_steps() {
  for (const int64_t world : {1, 2, 3, 4, 8}) {
    for (const int64_t stochastic : {0, 1}) {
      const Problem problem(leaves(stochastic), world, static_cast<float>(world));
      for (const int64_t segment_bytes : {1, 40, 100, 1 << 20}) {
        for (uint64_t seed = 1; seed <= 2; ++seed) {
          check(problem.right(problem.fused(segment_bytes, seed, -1, 2)),
                "world " + std::to_string(world) + " segments of " + std::to_string(segment_bytes) +
                    " seed " + std::to_string(seed));
        }
      }
    }
  }
  // Fewer records than ranks: some chunks are empty, and their segments are no messages.
  const Problem few({{40, 2, 32, 0, 0}}, 8, 1.0f);
  check(few.right(few.fused(1 << 20, 1)), "fewer records than ranks");
}

// Every single wait is needed: without it some order of the streams gives a wrong result.
void every_wait_is_needed() {
  for (const int64_t world : {2, 3}) {
    const Problem problem({{768, 4, 64, 0, 0}}, world, 1.0f);  // every segment is a record
    const int64_t segment_bytes = 45;
    check(problem.right(problem.fused(segment_bytes, 2)), "all waits");
    const int64_t count = emulator::waits();
    check(count >= 4 * 3 * world, "several segments");
    for (int64_t wait = 0; wait < count; ++wait) {
      bool caught = false;
      for (uint64_t seed = 1; seed <= 60 && !caught; ++seed) {
        caught = !problem.right(problem.fused(segment_bytes, seed, wait));
      }
      check(caught, "world " + std::to_string(world) + ": nothing misses wait " +
                        std::to_string(wait) + " of " + std::to_string(count));
    }
  }
}

// A communicator that does not block is asked until its messages are on the stream.
void waits_for_communicators_that_do_not_block() {
  static int pending = 0, asked = 0;
  const Problem problem(leaves(0), 2, 1.0f);
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

// Whatever NCCL call fails, the error names it, no group stays open, and the caller's stream still
// comes after the wire.
void failures_are_named() {
  const Problem problem({{600, 4, 64, 0, 0}}, 2, 1.0f);
  for (int64_t call = 0; call < 16; ++call) {
    const auto outcome = problem.fused(45, 1, -1, 1, call);
    const char* const names[] = {"ncclGroupStart", "ncclSend", "ncclRecv", "ncclGroupEnd"};
    check(outcome.error == std::string(names[call % 4]) + ": internal error",
          "failing call " + std::to_string(call) + ": " + outcome.error);
  }
}

}  // namespace

int main() {
  equals_the_steps();
  every_wait_is_needed();
  waits_for_communicators_that_do_not_block();
  failures_are_named();
  return report();
}
