// The all-reduce over peers' memory. The kernels of all ranks run at once and take turns as a seed
// chooses. The results are compared with the steps of the xla exchange on the CPU kernels, byte for
// byte.
//
//     peer_test            all tests
//     peer_test relaxed    flags make no data visible: the thread sanitizer must complain
#include "cuda/peer.h"

#include <cmath>

#include "problem.h"
#include "warp.h"

namespace {

// The thread sanitizer finds the races that a planted fault causes.
#if defined(__SANITIZE_THREAD__)
constexpr bool kFaultsEndTheProcess = true;
#else
constexpr bool kFaultsEndTheProcess = false;
#endif

// Ticks of the emulator's clock, which advances with every poll.
constexpr int64_t kForEver = int64_t{1} << 40, kShort = 1 << 12;

struct Case {
  int64_t world;
  std::vector<cgx::SlotSpec> specs;
  cgx::DType dtype = cgx::DType::kF32;
  bool residual = false;
  bool aligned = true;
  float divisor = 3.0f;
  bool in_host = false;  // where the windows lie
  bool in_units = false;
};

// One call of all ranks: operands and results.
struct Call {
  Case c;
  Problem problem;
  std::vector<Copies> in, out, lost;

  Call(const Case& given, uint32_t seed)
      : c(given),
        problem(cgx::Collective::kAllReduce, c.specs, c.world, c.divisor, c.residual, c.dtype,
                /*zeros=*/true, c.in_units, seed) {
    const Values empty = problem.empty(1, problem.dtypes);
    for (const Values& own : problem.in) {
      in.emplace_back(c.specs, problem.dtypes, pointers(own), !c.aligned);
      out.emplace_back(c.specs, problem.dtypes, pointers(empty), !c.aligned);
      lost.emplace_back(c.specs, problem.dtypes, pointers(empty), !c.aligned);
    }
  }
  bool right(int64_t rank) const {
    return out[rank] == pointers(problem.expected[rank]) &&
           (!c.residual || lost[rank] == pointers(problem.expected_lost[rank]));
  }
  bool right() const {
    for (int64_t r = 0; r < c.world; ++r) {
      if (!right(r)) return false;
    }
    return true;
  }
};

// Whether every value is NaN; fp32 only.
bool all_nan(const Copies& leaves) {
  for (size_t k = 0; k < leaves.data.size(); ++k) {
    for (int64_t i = 0; i < leaves.bytes[k] / 4; ++i) {
      if (!std::isnan(static_cast<const float*>(leaves.data[k])[i])) return false;
    }
  }
  return true;
}

// A node's devices: their windows and streams.
struct Node {
  cgx::WindowShape shape;
  std::vector<std::unique_ptr<uint64_t[]>> memory;
  std::vector<cgx::WindowState> states;
  std::vector<cudaStream_t> streams;
  std::unique_ptr<uint32_t[]> told;
  int64_t patience;

  // `largest` is the call that needs the largest window. With `areas` false, both legs share one
  // area.
  explicit Node(const Call& largest, int64_t patience = kForEver, bool areas = true)
      : states(largest.c.world), told(new uint32_t[largest.c.world]()), patience(patience) {
    emulator::reset();
    emulator::set_processors(4);
    emulator::lose_stores_to(nullptr);
    emulator::presume(nullptr);
    shape.world = static_cast<int32_t>(largest.c.world);
    shape.in_host = largest.c.in_host;
    shape.area_bytes = shape.world * row_bytes(largest);
    const int64_t bytes = shape.bytes();
    if (!areas) shape.area_bytes = 0;
    for (int32_t r = 0; r < shape.world; ++r) {
      memory.emplace_back(new uint64_t[bytes / 8]);
      // Records hold whatever was there before. Flags are cleared.
      std::memset(memory[r].get(), 0xCD, bytes);
      std::memset(memory[r].get(), 0, shape.rows());
      emulator::set_device(r);
      streams.push_back(emulator::create_stream());
    }
    for (int32_t r = 0; r < shape.world; ++r) {
      for (int32_t peer = 0; peer < shape.world; ++peer) {
        states[r].window[peer] = window(peer);
      }
    }
  }
  uint8_t* window(int64_t rank) const { return reinterpret_cast<uint8_t*>(memory[rank].get()); }
  static int64_t row_bytes(const Call& call) {
    return (call.problem.owned.view().chunk_bytes + 127) / 128 * 128;
  }

  // Puts a rank's part of a call on its stream. Returns the number of launches.
  size_t put(Call& call, int64_t rank) {
    std::vector<cgx::PeerTableInUnits> tables;
    const std::string error =
        cgx::peer_tables(call.problem.owned.view(), call.in[rank].in(), call.out[rank].out(),
                         call.c.residual ? call.lost[rank].out() : cgx::LeavesOut{},
                         call.problem.all_units(), &tables);
    check(error.empty(), "tables: " + error);
    emulator::set_device(static_cast<int>(rank));
    const cgx::PeerOptions options{call.c.residual, call.c.in_units};
    for (const cgx::PeerTableInUnits& table : tables) {
      const cgx::PeerArgs args{
          &states[rank],   shape,    &told[rank],    call.problem.keys[rank].data(),
          row_bytes(call), patience, call.c.divisor, static_cast<int32_t>(rank)};
      check(cgx::launch_peer(table, args, options, streams[rank]) == cudaSuccess, "launch");
    }
    check(emulator::cooperative_launches() == emulator::launches(), "all blocks run at once");
    check(emulator::most_blocks() <= emulator::processors() / 2, "half of the device is left");
    return tables.size();
  }
  size_t put(Call& call) {
    size_t launches = 0;
    for (int64_t r = 0; r < shape.world; ++r) launches = put(call, r);
    return launches;
  }
  bool run(uint64_t seed) {
    emulator::set_seed(seed);
    return emulator::run_streams(seed);
  }
};

std::vector<cgx::SlotSpec> leaves(int64_t bits, int64_t bucket, int64_t rounding, int64_t rotation,
                                  int64_t kind) {
  const int64_t segment = segment_of(bucket, kind);
  return {{7 * bucket + 33, bits, bucket, rounding, 0, rotation, segment},
          {3, bits, bucket, 0, 1, rotation},
          {0, bits, bucket, rounding, 2, rotation, segment},
          {3, bits, bucket, 0, 3, rotation},
          {2 * bucket, bits % 8 + 1, bucket, rounding, 4, 1 - rotation, segment}};
}

void equals_the_steps() {
  uint32_t seed = 0;
  for (const int64_t world : {1, 2, 3, 4, 8}) {
    for (int64_t bits = 1; bits <= 8; ++bits) {
      for (const bool residual : {false, true}) {
        ++seed;
        const auto dtype = static_cast<cgx::DType>(seed % 3);
        const int64_t bucket = seed % 5 == 0 ? 1024 : 64;  // more or less than a tile
        const Case c{world,
                     leaves(bits, bucket, seed % 3, seed / 2 % 2, seed / 4),
                     dtype,
                     residual,
                     seed % 4 != 0,
                     static_cast<float>(1 + seed % 4),
                     seed % 11 % 2 != 0,
                     seed % 7 % 2 != 0};
        Call call(c, seed);
        Node node(call);
        node.put(call);
        check(node.run(seed) && call.right(), "world " + std::to_string(world) + ", " +
                                                  std::to_string(bits) + " bits, case " +
                                                  std::to_string(seed));
      }
    }
  }
}

// Leaves that need several launches, and fewer records than ranks.
void any_number_of_pieces() {
  for (const int64_t count : {1, 16, 17, 60}) {
    for (const int64_t world : {2, 8}) {
      std::vector<cgx::SlotSpec> specs;
      for (int64_t k = 0; k < count; ++k) {
        specs.push_back({40 + k, 4, 64, k % 3, k});
      }
      Case c{world, specs};
      c.in_units = world == 8;
      Call call(c, 7);
      Node node(call);
      const size_t launches = node.put(call);
      check(count == 16 || (launches > 1) == (count > 16), "pieces: launches");
      check(node.run(3) && call.right(),
            "pieces: " + std::to_string(count) + " leaves, world " + std::to_string(world));
    }
  }
}

Case small(int64_t world, bool in_host, bool residual = false) {
  return {
      world,  {{400, 4, 32, 0, 0, 0}, {70, 3, 32, 2, 1, 0}}, cgx::DType::kF32, residual, true, 3.0f,
      in_host};
}

// Replays calls with different values every time, and sometimes with a different size. One rank
// falls behind before each of its calls. Returns whether all results are right.
bool replays(int64_t world, bool in_host, uint64_t seed, bool areas) {
  std::vector<Call> calls;
  for (uint32_t k = 0; k < 4; ++k) {
    Case c = small(world, in_host, k % 2);
    c.specs.back().size = 150 * world;
    if (k == 1) c.specs.pop_back();
    calls.emplace_back(c, static_cast<uint32_t>(10 * k + seed));
  }
  Node node(calls[0], kForEver, areas);
  for (Call& call : calls) {
    int rest = 200;
    emulator::submit(node.streams[seed % world], [rest]() mutable { return --rest < 0; });
    node.put(call);
  }
  bool right = node.run(seed);
  for (const Call& call : calls) right = right && call.right();
  return right;
}

// A rank that is as far ahead as possible does not disturb one that is behind. It would if both
// legs used the same memory.
void replays_do_not_meet(bool in_host) {
  for (const int64_t world : {2, 3, 4, 8}) {
    bool caught = kFaultsEndTheProcess;
    for (uint64_t seed = 1; seed <= 6; ++seed) {
      check(replays(world, in_host, seed, /*areas=*/true),
            "replays of world " + std::to_string(world) + " seed " + std::to_string(seed));
    }
    for (uint64_t seed = 1; seed <= 60 && !caught; ++seed) {
      caught = !replays(world, in_host, seed, /*areas=*/false);
    }
    check(caught, "world " + std::to_string(world) + ": nothing misses the second area");
  }
}

// Every flag that this call raises, ordered by reader.
std::vector<const uint64_t*> flags_of(const Node& node, const Call& call) {
  std::vector<cgx::PeerTableInUnits> tables;
  check(cgx::peer_tables(call.problem.owned.view(), call.in[0].in(), call.out[0].out(), {}, nullptr,
                         &tables)
            .empty(),
        "tables");
  check(tables.size() == 1, "flags: one launch");
  const auto packets = [&](int chunk) {
    return (tables[0].chunk[chunk + 1] - tables[0].chunk[chunk] + tables[0].packet - 1) /
           tables[0].packet;
  };
  std::vector<const uint64_t*> flags;
  for (int reader = 0; reader < node.shape.world; ++reader) {
    for (int from = 0; from < node.shape.world; ++from) {
      for (int p = 0; from != reader && p < packets(reader); ++p) {
        flags.push_back(node.shape.arrived(node.window(reader), cgx::Leg::kToOwner, p, from));
      }
      for (int p = 0; p < packets(from); ++p) {
        flags.push_back(node.shape.arrived(node.window(reader), cgx::Leg::kFromOwner, p, from));
      }
    }
  }
  return flags;
}

// If a reader presumes any one flag as raised, some order gives a wrong result. This is the same as
// a flag that is raised before its data is there.
void every_wait_is_needed(bool in_host) {
  for (const int64_t world : {2, 3}) {
    Call call(small(world, in_host), 1);
    const size_t count = flags_of(Node(call), call).size();
    check(count >= static_cast<size_t>(8 * world), "waits: several packets");
    for (size_t k = 0; k < count; ++k) {
      bool caught = false;
      for (uint64_t seed = 1; seed <= 60 && !caught; ++seed) {
        Call again(small(world, in_host), 1);
        Node node(again);
        emulator::presume(flags_of(node, again)[k]);
        node.put(again);
        caught = !(node.run(seed) && again.right());
      }
      check(caught, "world " + std::to_string(world) + ": nothing misses the wait for flag " +
                        std::to_string(k));
    }
  }
  emulator::presume(nullptr);
}

// If a flag is never raised, its reader gives up, says so and leaves NaN. The reader's later
// results are NaN too, and by the next call every other rank has given up as well.
void a_lost_flag_is_told(bool in_host) {
  for (const int64_t world : {2, 3, 8}) {
    Call first(small(world, in_host, true), 1);
    const size_t count = flags_of(Node(first), first).size();
    for (size_t k = 0; k < count; k += world == 2 ? 1 : 7) {
      Call call(small(world, in_host, true), 1), later(small(world, in_host, true), 2);
      Node node(call, kShort);
      const uint64_t* const flag = flags_of(node, call)[k];
      emulator::lose_stores_to(flag);
      node.put(call);
      check(node.run(k), "lost: the launches end");
      int64_t reader = 0;
      while (reinterpret_cast<const uint8_t*>(flag) < node.window(reader) ||
             reinterpret_cast<const uint8_t*>(flag) >= node.window(reader) + node.shape.bytes()) {
        ++reader;
      }
      check(node.told[reader] == 1 && !call.right(reader), "lost: its reader knows");
      emulator::lose_stores_to(nullptr);
      node.put(later);
      check(node.run(k + 1), "lost: later launches end");
      for (int64_t r = 0; r < world; ++r) {
        check(node.told[r] == 1 && !later.right(r), "lost: every rank knows");
      }
      check(all_nan(later.out[reader]) && all_nan(later.lost[reader]), "lost: NaN");
    }
  }
}

// A rank that never comes.
void a_missing_rank_is_told(bool in_host) {
  for (const int64_t world : {2, 4}) {
    Call call(small(world, in_host), 1);
    Node node(call, kShort);
    for (int64_t r = 1; r < world; ++r) node.put(call, r);
    check(node.run(1), "missing: the launches end");
    for (int64_t r = 1; r < world; ++r) {
      check(node.told[r] == 1 && all_nan(call.out[r]), "missing: every other rank knows");
    }
  }
}

void too_many_ranks_are_refused() {
  Call call({33, {{400, 4, 32, 0, 0, 0}}}, 1);
  std::vector<cgx::PeerTableInUnits> tables;
  check(cgx::peer_tables(call.problem.owned.view(), call.in[0].in(), call.out[0].out(), {}, nullptr,
                         &tables) == "the number of ranks is 33, must be at most 32",
        "33 ranks are refused");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "relaxed") == 0) {
    emulator::relax_stores(true);
    Call call(small(2, false), 1);
    Node node(call);
    node.put(call);
    node.run(1);
    return report();
  }
  equals_the_steps();
  any_number_of_pieces();
  for (const bool in_host : {false, true}) {
    replays_do_not_meet(in_host);
    if (!kFaultsEndTheProcess) every_wait_is_needed(in_host);
    a_lost_flag_is_told(in_host);
    a_missing_rank_is_told(in_host);
  }
  too_many_ranks_are_refused();
  return report();
}
