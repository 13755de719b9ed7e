// A rank's calls over MPI among hostile peers: all-reduces, rows and notices. What peers send may
// make numbers wrong, but a call must succeed or end with an error, and touch only its own memory.
#include "messages/rows.h"

#include <memory>

#include "cpu/worker_pool.h"
#include "fuzz/hostile_port.h"
#include "messages/fused.h"
#include "messages/notices.h"

namespace fuzz {
namespace {

// Arrays of exactly their size.
class Arrays {
 public:
  char* of(Random& random, int64_t bytes) {
    blocks_.emplace_back(new char[bytes]);
    random.fill(blocks_.back().get(), bytes);
    return blocks_.back().get();
  }

 private:
  std::vector<std::unique_ptr<char[]>> blocks_;
};

cgx::CallSettings some_settings(Random& random) {
  return {random.of<int64_t>({64, 65, 100, 1000, 1 << 17}), random.within(2, 5)};
}

cgx::Program some_program(Random& random) {
  std::string label(random.below(100), 'x');
  random.fill(label.data(), static_cast<int64_t>(label.size()));
  return cgx::Program(label);
}

int64_t some_world(Random& random) {
  return random.chance(64) ? random.within(1, 40) : random.within(1, 5);
}

// Advances a call until it is over.
void finish(Random& random, const char* name, const Manners& manners, int64_t world,
            cgx::Call& call, cgx::BufferPool& buffers) {
  constexpr int64_t kMostSteps = 1'000'000;
  int64_t steps = 0;
  for (; !call.done() && call.error().empty(); ++steps) {
    call.advance();
    if (random.chance(64)) call.awaited(), call.greeted(random.below(world));
    if (steps == kMostSteps)
      fail(std::string(name) + " never ends: it waits for " + call.awaited());
  }
  if (manners.lies == 0 && manners.fails == 0 && !call.error().empty()) {
    fail(std::string(name) + " fails among peers that keep to the protocol: " + call.error());
  }
  if (call.error().empty()) call.release(buffers);
  count(name, !call.error().empty());
}

void all_reduce(Random& random, const Manners& manners, cgx::BufferPool& buffers) {
  static cgx::WorkerPool alone(1), two(2);
  Arrays arrays;
  cgx::FusedSpec spec;
  std::vector<cgx::SlotSpec> leaves;
  const int64_t world = some_world(random);
  const bool residual = random.chance(2), units = random.chance(2), gathers = random.chance(2);
  spec.collective = gathers ? cgx::Collective::kGatherSum : cgx::Collective::kAllReduce;
  spec.world = world;
  for (int64_t k = random.below(4); k > 0; --k) {
    leaves.push_back({random.size(3000), random.within(1, 8), random.of<int64_t>({32, 64, 512}),
                      random.below(3), random.below(5), random.below(2), 0});
    const cgx::DType dtype = random.of({cgx::DType::kF32, cgx::DType::kBF16, cgx::DType::kF16});
    const int64_t bytes = leaves.back().size * cgx::item_size(dtype);
    const cgx::DType sums = units && gathers ? cgx::DType::kF32 : dtype;
    spec.dtypes.push_back(dtype);
    spec.out_dtypes.push_back(sums);
    spec.in.push_back(arrays.of(random, bytes));
    spec.out.push_back(arrays.of(random, leaves.back().size * cgx::item_size(sums)));
    if (residual) spec.residuals.push_back(arrays.of(random, bytes));
    if (!units) continue;
    const int64_t columns = leaves.back().size, count = 1 + columns;
    const float* const numbers = reinterpret_cast<float*>(arrays.of(random, 8 * count));
    spec.units.push_back({numbers, numbers + 1, columns, count});
  }
  if (const std::string error = spec.owned.build(leaves, gathers ? 1 : world); !error.empty())
    fail(error);
  random.fill(spec.keys, sizeof(spec.keys));
  spec.divisor = static_cast<float>(world);
  spec.rank = random.below(world);
  spec.tag = static_cast<int>(cgx::kCallTags * random.below(10));
  spec.program = some_program(random);
  cgx::FusedCall call(std::move(spec), some_settings(random),
                      std::make_unique<HostilePort>(Random(random.bits(), 0), manners, world),
                      random.chance(64) ? two : alone, buffers);
  finish(random, "all-reduce", manners, world, call, buffers);
}

void rows(Random& random, const Manners& manners, cgx::BufferPool& buffers) {
  Arrays arrays;
  const int64_t world = some_world(random), bytes = random.size(20000);
  const bool gathers = random.chance(2);
  char* const in = arrays.of(random, (gathers ? 1 : world) * bytes);
  const cgx::RowsSpec spec{gathers,
                           reinterpret_cast<uint8_t*>(in),
                           reinterpret_cast<uint8_t*>(arrays.of(random, world * bytes)),
                           bytes,
                           world,
                           random.below(world),
                           static_cast<int>(cgx::kCallTags * random.below(10)),
                           some_program(random)};
  cgx::RowsCall call(spec, some_settings(random),
                     std::make_unique<HostilePort>(Random(random.bits(), 0), manners, world),
                     buffers);
  finish(random, "rows", manners, world, call, buffers);
}

void notices(Random& random, const Manners& manners) {
  const int64_t ranks = some_world(random);
  const auto port = [&](uint64_t number) {
    return std::make_unique<HostilePort>(Random(random.bits(), number), manners, ranks);
  };
  cgx::Notices all(port(1), port(2), ranks, random.below(ranks), 7);
  all.listen();
  for (int64_t k = random.below(20); k > 0; --k) {
    all.poll();
    const int64_t rank = random.below(ranks);
    if (all.of(rank) == cgx::Notices::kFailed) all.text(rank);
    all.text(rank);
  }
  count("notices", false);
}

}  // namespace

void rows_case(Random& random) {
  cgx::BufferPool buffers;
  for (int64_t k = random.within(1, 4); k > 0; --k) {  // calls pass memory on to later ones
    const Manners manners =
        random.chance(2) ? Manners{0, 0} : Manners{random.below(20), random.below(100)};
    const int64_t kind = random.below(8);
    if (kind == 0) notices(random, manners);
    if (kind > 0 && kind < 4) rows(random, manners, buffers);
    if (kind >= 4) all_reduce(random, manners, buffers);
  }
}

}  // namespace fuzz
