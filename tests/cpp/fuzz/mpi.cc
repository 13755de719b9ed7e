// The handlers of the calls over MPI, on top of the engine and its threads, among hostile peers.
#include "handlers/mpi.h"

#include "fuzz/codec.h"
#include "fuzz/hostile_port.h"
#include "messages/network.h"

namespace fuzz {
namespace {

// The first two ports are those of the notices, which the engine looks at by the clock.
cgx::PortFactory hostile_ports(uint64_t seed, Manners manners, int64_t ranks) {
  return [=, made = uint64_t{0}](std::vector<int32_t> peers) mutable -> std::unique_ptr<cgx::Port> {
    for (const int32_t peer : peers) {
      if (peer < 0 || peer >= ranks) fail("messages to rank " + std::to_string(peer));
    }
    if (++made <= 2) return std::make_unique<SilentPort>();
    return std::make_unique<HostilePort>(Random(seed, made), manners,
                                         static_cast<int64_t>(peers.size()));
  };
}

constexpr int64_t kLargestTag = 32767;

// The ranks that take part: groups of `world` ranks. This rank is in one of them.
struct Where {
  int64_t ranks, rank, world;
  Ints groups;

  explicit Where(Random& random)
      : ranks(random.within(1, 6)), rank(random.below(ranks)), world(random.within(1, ranks)) {
    for (int64_t r = 0; r < ranks; ++r) groups.push_back((rank + r) % ranks);
    groups.resize(ranks / world * world);
    for (size_t i = groups.size(); i > 1; --i) {
      std::swap(groups[i - 1], groups[random.below(static_cast<int64_t>(i))]);
    }
  }
  void add_to(Random& random, Call* call) const {
    call->attributes["groups"] = groups;
    call->attributes["world"] = world;
    call->attributes["channel"] = random.below(kLargestTag / cgx::kCallTags / 2);
    call->attributes["name"] = std::string("psum_compressed(exchange='mpi')");
    call->attributes["program"] = std::string(random.below(100), 'p');
  }
};

// Leaves of a gather-sum have no units here, because sums of leaves with units have other dtypes.
// A call at once, or what starts or finishes one that others may have started, or nobody.
enum class Part { kWhole, kStart, kFinish };

Call reduce_call(Random& random, const Where& where, bool gathers, Part part) {
  static uint32_t last[2];  // a ticket
  Call call;
  const Leaves leaves(random, 1, gathers ? 1 : where.world, 600, gathers ? 0 : kLongestBucket);
  call.arg(random, XLA_FFI_DataType_U32, {gathers ? 2 : 4});
  call.places(random, {1}, where.rank, where.rank);
  if (part != Part::kWhole) {
    char* const ticket = call.arg(random, XLA_FFI_DataType_U32, {2}).data;
    if (random.chance(2)) std::memcpy(ticket, last, sizeof(last));
    std::memcpy(last, ticket, sizeof(last));
    call.attributes["number"] = random.below(2);
  }
  leaves.add_args(random, &call);
  leaves.add_units(random, &call);
  if (part == Part::kStart) {
    call.ret(random, XLA_FFI_DataType_U32, {2});
    call.attributes["residuals"] = random.below(2);
  } else {
    leaves.add_rets(random, &call);
    if (random.chance(2)) leaves.add_rets(random, &call);
  }
  leaves.add_attributes(&call);
  call.attributes["divisor"] = 2.0f;
  where.add_to(random, &call);
  return call;
}

Call rows_call(Random& random, const Where& where, bool gathers) {
  Call call;
  const int64_t length = random.size(5000);
  const auto type = random.of<XLA_FFI_DataType>({XLA_FFI_DataType_U8, XLA_FFI_DataType_F32});
  call.places(random, {1}, where.rank, where.rank);
  if (gathers) {
    call.arg(random, type, {length});
  } else {
    call.arg(random, type, {where.world, length});
  }
  call.ret(random, type, {where.world, length});
  where.add_to(random, &call);
  return call;
}

}  // namespace

// Makes calls on one engine. After a call has failed, the engine fails all later ones.
void mpi_case(Random& random) {
  const Where where(random);
  const bool hostile = random.chance(4);
  const Manners manners{hostile ? random.below(8) : 0, hostile ? random.below(50) : 0};
  const bool engine = !random.chance(16);
  const int64_t threads = random.chance(16) ? 2 : 1;
  if (engine) {
    cgx::set_engine(std::make_unique<cgx::Engine>(
        hostile_ports(random.bits(), manners, where.ranks),
        cgx::EngineSettings{where.ranks,
                            where.rank,
                            kLargestTag,
                            {random.of<int64_t>({64, 100, 1 << 17}), random.within(2, 5)},
                            600,
                            threads}));
  }
  static const auto handlers = cgx::mpi_handlers();  // in the order of the kinds below
  static int64_t runs = 0;
  for (int64_t k = random.within(1, 40); k > 0; --k) {
    const int64_t kind = random.below(8);
    const Part part = kind < 2 ? Part::kWhole : kind < 6 ? Part::kStart : Part::kFinish;
    Call call = kind == 2 || kind == 3 ? rows_call(random, where, kind == 3)
                                       : reduce_call(random, where, kind % 2 == 1, part);
    const bool damaged = random.chance(2);
    if (damaged) damage(random, &call);
    Frame frame;
    call.fill(&frame);
    XLA_FFI_InvokeContext context;
    context.run = ++runs;
    const auto& [target, handler] = handlers[kind];
    const std::string said = frame.call(handler, XLA_FFI_ExecutionStage_EXECUTE, &context);
    count(target, !said.empty());
    // What has the ticket of another call is refused.
    if (engine && !damaged && !hostile && !said.empty() && part != Part::kFinish) {
      fail(std::string(target) + " refuses a right call: " + said);
    }
  }
  cgx::set_engine(nullptr);
}

}  // namespace fuzz
