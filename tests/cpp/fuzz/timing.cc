// The helpers that time kernels, which benchmarks load by ctypes. Whatever they are given, they
// must report what is wrong.
#include <memory>

#include "benchmarks/kernel_timing.cc"
#include "fuzz/fuzz.h"
#include "refused_threads.h"

namespace fuzz {
namespace {

// An array of exactly its size.
struct Block {
  std::unique_ptr<char[]> memory;
  Array array;

  Block(Random& random, int64_t bytes)
      : memory(new char[bytes]), array{bytes == 0 ? nullptr : memory.get(), bytes} {
    random.fill(memory.get(), bytes);
  }
};

int64_t some_threads(Random& random) {
  if (random.chance(4)) return random.hostile();
  return random.chance(16) ? 3 : 1;
}

const char* time_kernel(Random& random, double* seconds) {
  const int64_t size = random.size(5000), bits = random.within(1, 8);
  const int64_t bucket = random.of<int64_t>({32, 64, 512}), world = random.within(1, 4);
  const char* const kernel =
      random.of<const char*>({"encode", "reduce", "decode", "accumulate", "none"});
  const bool alone = std::string(kernel) == "accumulate";
  cgx::OwnedLayout owned;
  owned.build({{size, bits, bucket, 0, 0}}, alone ? 1 : world);
  const int64_t row = owned.view().chunk_bytes;
  const Block leaf(random, 4 * size), out(random, 4 * size), payload(random, world * row),
      chunk(random, row), none(random, 0);
  const int64_t columns = size % 3 == 0 ? 3 : 1;
  const Block units(random, 8 * (size / columns + columns));
  Timed timed{kernel,
              0,
              bits,
              bucket,
              random.below(3),
              0,
              world,
              random.below(world),
              some_threads(random),
              1.0,
              leaf.array,
              out.array,
              payload.array,
              chunk.array,
              random.chance(2) ? units.array : none.array,
              random.chance(2) ? columns : random.hostile()};
  int64_t* const numbers[] = {&timed.dtype,    &timed.bits,  &timed.bucket_size, &timed.rounding,
                              &timed.rotation, &timed.world, &timed.rank};
  if (random.chance(2)) *numbers[random.below(7)] = random.hostile();
  return cgx_time_kernel(&timed, seconds);
}

const char* time_code(Random& random, double* seconds) {
  const char* const code = random.of<const char*>(
      {"signs", "decode signs", "largest", "above a sampled threshold", "largest of every bucket",
       "natural", "ternary", "qsgd", "qsgd of the largest", "none"});
  const std::string name = code;
  const int64_t n = random.size(5000), bucket = random.of<int64_t>({32, 64, 512, 4096});
  const int64_t keep = random.within(1, 30), levels = random.within(1, 127);
  int64_t width = 0;
  while (2 * levels >> width != 0) ++width;
  const int64_t buckets = (n + bucket - 1) / bucket;
  const int64_t bytes = name.find("signs") != name.npos     ? (n + 7) / 8
                        : name == "largest of every bucket" ? 4 * buckets * keep
                        : name == "natural"                 ? n
                        : name == "ternary"                 ? (n + 4) / 5 + 4 * buckets
                        : name.find("qsgd") == 0            ? (n * width + 7) / 8 + 4 * buckets
                                                            : 4 * keep;
  const Block values(random, 4 * n), out(random, bytes), taken(random, bytes);
  TimedCode timed{code,   some_threads(random), keep,      bucket,
                  levels, values.array,         out.array, taken.array};
  int64_t* const numbers[] = {&timed.keep, &timed.bucket_size, &timed.levels};
  if (random.chance(2)) *numbers[random.below(3)] = random.hostile();
  return cgx_time_code(&timed, seconds);
}

}  // namespace

void timing_case(Random& random) {
  double seconds = -1;
  threads_left = 8;
  const bool code = random.chance(2);
  const char* const error = code ? time_code(random, &seconds) : time_kernel(random, &seconds);
  count(code ? "time_code" : "time_kernel", error != nullptr);
  threads_left = INT64_MAX;
  if (!error && !(seconds >= 0)) fail("a call that is said to be right has no time");
}

}  // namespace fuzz
