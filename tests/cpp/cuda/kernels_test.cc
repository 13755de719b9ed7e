// The source of the CUDA kernels, run on the CPU by tests/cpp/emulator, compared with the CPU
// kernels byte for byte.
#include "cpu/kernels.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>

#include "cases.h"
#include "cuda/codec.h"
#include "format/runs.h"
#include "warp.h"

namespace {

using Bytes = std::vector<uint8_t>;

struct Case {
  std::vector<cgx::SlotSpec> leaves;
  cgx::DType dtype;
  int64_t world;
  float divisor;
  bool odd;  // leaves start at odd addresses of their dtype
};

std::string name_of(const Case& c) {
  const cgx::SlotSpec& last = c.leaves.back();
  return "bits " + std::to_string(last.bits) + " bucket " + std::to_string(last.bucket_size) +
         " rounding " + std::to_string(last.rounding) + (last.rotation ? " rotated" : "") +
         (last.segment ? " segment " + std::to_string(last.segment) : "") + " dtype " +
         std::to_string(static_cast<int>(c.dtype)) + " world " + std::to_string(c.world) +
         (c.odd ? " unaligned" : "");
}

// Gives the records of a chunk, in every row, other masks. About half of them are 0.
void set_masks(const cgx::Layout& layout, int64_t chunk, int64_t rows, std::mt19937& rng,
               uint8_t* payload) {
  cgx::for_each_run(layout, layout.begin[chunk], layout.begin[chunk + 1], [&](const cgx::Run& run) {
    const int64_t stride = cgx::Record{run.slot.bucket_size, run.slot.bits}.bytes();
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t first = run.offset + (row - chunk) * layout.chunk_bytes;
      for (int64_t k = 0; k < run.last - run.first; ++k) {
        uint8_t* const mask = payload + first + k * stride + 4;
        const uint32_t all = rng(), kind = rng() % 4;
        if (kind < 2) std::memset(mask, 0, 2);
        if (kind == 2) std::memcpy(mask, &all, 2);
        if (kind == 3) std::memset(mask, 0xFF, 2);
      }
    }
  });
}

bool done(cudaError_t error) { return error == cudaSuccess; }

// Units of leaves, in blocks of exactly their size. Every fourth leaf has none, nor have long
// buckets.
struct LeavesUnits {
  std::vector<std::vector<float>> arrays;
  std::vector<cgx::LeafUnits> leaves;

  LeavesUnits(const std::vector<cgx::SlotSpec>& specs, std::mt19937& rng) {
    std::normal_distribution<float> normal;
    const float extremes[] = {0.0f, INFINITY, NAN, 1e38f, -1e-40f};
    for (const cgx::SlotSpec& spec : specs) {
      cgx::LeafUnits& own = leaves.emplace_back();
      if (rng() % 4 == 0 || spec.size == 0 || spec.bucket_size > cgx::kTileValues) continue;
      int64_t columns = rng() % 3 ? 1 + rng() % std::min<int64_t>(spec.size, 700) : spec.size;
      while (spec.size % columns != 0) --columns;
      const int64_t rows = spec.size / columns, count = rows + columns;
      std::vector<float>& numbers = arrays.emplace_back(2 * count);
      for (float& f : numbers) f = rng() % 997 ? normal(rng) : extremes[rng() % 5];
      own = {numbers.data(), numbers.data() + rows, columns, count};
    }
  }
};

void compare(const Case& c, const cgx::LeafUnits* units, std::mt19937& rng) {
  const std::string name = name_of(c) + (units ? " in units" : "");
  const cgx::KernelTable& cpu = cgx::current_kernels();
  const Buffers x(c.leaves, c.dtype, rng);
  Buffers residual(x.specs, c.dtype, rng), y(x.specs, c.dtype, rng);
  const auto copies = [&](const Buffers& of) {
    return Copies(of.specs, of.dtypes, of.data, c.odd);
  };
  const Copies in = copies(x), got_residual = copies(residual), got = copies(y);
  cgx::OwnedLayout owned;
  check(owned.build(x.specs, c.world).empty(), name + ": layout");
  const cgx::Layout layout = owned.view();
  const int64_t total = layout.total_bytes(), bytes = c.world * layout.chunk_bytes;
  const uint32_t key[2] = {7, 11};
  std::vector<float> scratch(owned.scratch_values());
  const cgx::LeavesIn leaves = in.in();

  for (const int32_t rank : {-1, static_cast<int32_t>(c.world) - 1}) {
    Bytes payload(bytes, 0xAA), expected(bytes, 0xAA);
    cgx::zero_tails(layout, expected.data());
    cpu.encode({layout, x.in(), residual.out(), key, rank, expected.data(), scratch.data(), units},
               0, total);
    const cgx::LeavesOut lost = got_residual.out();
    check(done(cgx::encode({layout, leaves, lost, key, {&rank, 0}, payload.data(), true, 0, units},
                           {{0, total}}, nullptr)),
          name + ": encode");
    check(payload == expected, name + ": payload of rank " + std::to_string(rank));
    check(got_residual == residual.data, name + ": residual of rank " + std::to_string(rank));
    // Without residuals, range by range and with the rank known: the same bytes.
    Bytes parts(bytes, 0xAA);
    cgx::zero_tails(layout, parts.data());
    for (const auto& [from, to] : {std::make_pair(int64_t{0}, total / 3), {total / 3, total}}) {
      check(done(cgx::encode(
                {layout, leaves, {}, key, {nullptr, rank}, parts.data(), false, 0, units},
                {{from, to}}, nullptr)),
            name + ": encode a range");
    }
    check(parts == expected, name + ": payload by ranges");
  }

  // Rows of peers: random bytes, which give any range, and what peers with these values send.
  const auto peers = noise(bytes, rng);
  for (int64_t w = 0; w < c.world; ++w) set_masks(layout, w, c.world, rng, peers.get());
  Bytes encoded(bytes), sent(bytes);
  cpu.encode({layout, x.in(), {}, key, -1, encoded.data(), scratch.data()}, 0, total);
  for (int32_t rank = 0; rank < c.world && !(units && rank > 1); ++rank) {
    for (int64_t w = 0; w < c.world; ++w) {
      std::copy_n(&encoded[rank * layout.chunk_bytes], layout.chunk_bytes,
                  &sent[w * layout.chunk_bytes]);
    }
    if (rank % 2) set_masks(layout, rank, c.world, rng, sent.data());
    for (const bool real : {false, true}) {
      const uint8_t* const rows = real ? sent.data() : peers.get();
      const bool residuals = real == (rank % 2 == 0);
      Bytes chunk(layout.chunk_bytes, 0xAA), expected(layout.chunk_bytes, 0);
      cpu.reduce({layout, x.in(), key, rank, rows, c.divisor, expected.data(), scratch.data(),
                  residuals ? residual.out() : cgx::LeavesOut{}, units},
                 layout.begin[rank], layout.begin[rank + 1]);
      const cgx::LeavesOut lost = residuals ? got_residual.out() : cgx::LeavesOut{};
      check(done(cgx::reduce(
                {layout, leaves, key, {&rank, 0}, rows, c.divisor, chunk.data(), true, lost, units},
                {{0, total}}, nullptr)),
            name + ": reduce");
      check(chunk == expected, name + ": chunk of rank " + std::to_string(rank));
      check(got_residual == residual.data, name + ": residual of chunk " + std::to_string(rank));
    }
  }

  cpu.decode({layout, peers.get(), y.out(), scratch.data(), units}, 0, total);
  const cgx::LeavesOut out = got.out();
  check(done(cgx::decode({layout, peers.get(), out, units}, {{0, total}}, nullptr)),
        name + ": decode");
  check(got == y.data, name + ": decoded values");
  if (units) return;

  cgx::OwnedLayout whole;
  check(whole.build(x.specs, 1).empty(), name + ": layout of one rank");
  const auto rows = noise(3 * whole.view().total_bytes(), rng);
  set_masks(whole.view(), 0, 3, rng, rows.get());
  const int32_t skip = 1;
  cpu.accumulate({whole.view(), x.in(), rows.get(), 3, skip, c.divisor, y.out(), scratch.data()}, 0,
                 whole.view().total_bytes());
  check(done(cgx::accumulate({whole.view(), leaves, rows.get(), 3, {&skip, 0}, c.divisor, out},
                             {{0, whole.view().total_bytes()}}, nullptr)),
        name + ": accumulate");
  check(got == y.data, name + ": accumulated values");
}

void compare(const Case& c, std::mt19937& rng) {
  compare(c, nullptr, rng);
  const auto takes_units = [](const cgx::SlotSpec& leaf) {
    return leaf.bucket_size <= cgx::kTileValues;
  };
  if (c.world > 5 || std::none_of(c.leaves.begin(), c.leaves.end(), takes_units)) return;
  compare(c, LeavesUnits(c.leaves, rng).leaves.data(), rng);
}

// How the leaves of a case are encoded.
struct Options {
  int64_t rounding;
  bool rotated;
  int64_t kind = 0;  // of the leaves' segments
};
constexpr Options kOptions[] = {{0, false}, {1, false}, {2, false},
                                {0, true},  {1, true},  {2, true}};

std::vector<cgx::SlotSpec> of_sizes(const std::vector<int64_t>& sizes, int64_t bits, int64_t bucket,
                                    Options options) {
  std::vector<cgx::SlotSpec> specs;
  for (const int64_t size : sizes) {
    const int64_t number = static_cast<int64_t>(specs.size());
    const int64_t segment = segment_of(bucket, options.kind + number);
    specs.push_back({size, bits, bucket, options.rounding, number, options.rotated, segment});
  }
  return specs;
}

// Lengths around a bucket's.
std::vector<int64_t> around(int64_t bucket) {
  return {0, 1, 31, bucket - 1, bucket, bucket + 1, 3 * bucket + 33};
}

// Compares one of two shares of all combinations of widths, dtypes, buckets and options.
void tables(std::mt19937& rng, int round) {
  // Every width and dtype at sizes around a bucket's; every width with every option.
  int number = 3 * round;
  for (int64_t bits = 1; bits <= 8; ++bits, ++number) {
    const bool odd = bits % 2;
    for (const auto dtype : {cgx::DType::kF32, cgx::DType::kBF16, cgx::DType::kF16}) {
      Options one = kOptions[number++ % 6], other = kOptions[number++ % 6];
      one.kind = bits, other.kind = bits + 1;
      compare({of_sizes(around(512), bits, 512, one), dtype, 3, 3.0f, odd}, rng);
      compare({of_sizes(around(96), bits, 96, other), dtype, 2, 2.0f, !odd}, rng);
    }
  }
  // Buckets of less than one tile, of a fraction of a tile, of several tiles, and of more tiles
  // than are held in registers; and every width of a rotation's blocks.
  number = 3 * round;
  for (const int64_t bucket : {32, 64, 128, 384, 544, 768, 1024, 2048, 2080, 4096}) {
    for (int k = 0; k < 3; ++k, ++number) {
      const std::vector<int64_t> sizes = {5, 2 * bucket + 17};
      Options options = kOptions[number % 6];
      options.kind = number;
      compare(
          {of_sizes(sizes, 3 + number / 2 % 2, bucket, options), cgx::DType::kF32, 2, 1.0f, false},
          rng);
    }
  }
  // More leaves, and more ranks, than a table has pieces; all widths and options in one buffer.
  std::vector<cgx::SlotSpec> many;
  for (int64_t k = 0; k < 3 * cgx::kFewPieces; ++k) {
    const int64_t bucket = 32 + 32 * (k % 3), segment = k % 5 == 0 ? 0 : segment_of(bucket, k / 5);
    many.push_back({(37 * k) % 300, 1 + k % 8, bucket, k / 8 % 3, k, k % 7 == 0, segment});
  }
  for (const int64_t world : {1, 5, 64}) {
    compare({many, cgx::DType::kF32, world, 7.0f, false}, rng);
  }
  compare({of_sizes({70000}, 4, 512, {0, false}), cgx::DType::kF32, 130, 1.0f, false}, rng);
  // More buckets than the emulated kernels' tables have units, and long ones among short ones.
  compare({of_sizes({70000}, 4, 96, {0, false}), cgx::DType::kF32, 2, 1.0f, false}, rng);
  std::vector<cgx::SlotSpec> mixed(100, {100, 4, 512, 0, 0});
  mixed[80] = {1500, 4, 1024, 0, 0};
  compare({mixed, cgx::DType::kF32, 2, 2.0f, false}, rng);
}

// One launch holds the pieces of many leaves, but fewer if buckets are long. The bytes equal the
// CPU's.
void launches(std::mt19937& rng) {
  struct Counts {
    int64_t leaves, bucket, expected;
  };
  for (const Counts& c : {Counts{1, 512, 1},
                          {56, 512, 1},
                          {57, 512, 1},
                          {300, 512, 1},
                          {510, 512, 1},
                          {511, 512, 2},
                          {1, 544, 1},
                          {56, 544, 1},
                          {57, 544, 2},
                          {300, 544, 6}}) {
    const std::string name =
        std::to_string(c.leaves) + " leaves, bucket " + std::to_string(c.bucket) + ": launches of ";
    const std::vector<int64_t> sizes(c.leaves, c.bucket > 512 ? c.bucket : 33);
    const Case one = {of_sizes(sizes, 4, c.bucket, {0, false}), cgx::DType::kF32, 1, 1.0f, false};
    compare(one, rng);
    const Buffers x(one.leaves, one.dtype, rng), y(one.leaves, one.dtype, rng);
    cgx::OwnedLayout owned;
    check(owned.build(x.specs, 1).empty(), name + "layout");
    const cgx::Layout layout = owned.view();
    const std::vector<cgx::Range> all = {{0, layout.total_bytes()}};
    const uint32_t key[2] = {0, 0};
    Bytes payload(layout.chunk_bytes), sum(layout.chunk_bytes);
    const auto expect = [&](const char* call, auto run) {
      const int64_t before = emulator::launches();
      check(done(run()), name + call);
      const int64_t made = emulator::launches() - before;
      check(made == c.expected, name + call + ": " + std::to_string(made));
    };
    expect("encode", [&] {
      return cgx::encode({layout, x.in(), {}, key, {nullptr, -1}, payload.data(), false}, all,
                         nullptr);
    });
    expect("reduce", [&] {
      return cgx::reduce(
          {layout, x.in(), key, {nullptr, 0}, payload.data(), 1.0f, sum.data(), false, {}}, all,
          nullptr);
    });
    expect("decode", [&] { return cgx::decode({layout, payload.data(), y.out()}, all, nullptr); });
    expect("accumulate", [&] {
      return cgx::accumulate({layout, x.in(), payload.data(), 1, {nullptr, -1}, 1.0f, y.out()}, all,
                             nullptr);
    });
  }
}

// Values that a format may trip over: each alone in a bucket of ordinary values, all together, and
// each filling a whole bucket.
void special_values(Options options) {
  const std::vector<float> values = {NAN,     INFINITY, -INFINITY, 3.4e38f, -3.4e38f, 1e-45f,
                                     -1e-45f, 1e-38f,   0.0f,      -0.0f,   2.5e-38f, 1.0f};
  const int64_t bucket = 32, number = values.size();
  std::vector<float> x(bucket * (2 * number + 1), 0.25f);
  for (int64_t k = 0; k < number; ++k) {
    x[bucket * k + k] = values[k];
    x[bucket * number + k] = values[k];
    std::fill_n(&x[bucket * (number + 1 + k)], bucket, values[k]);
  }
  for (const int64_t first : {int64_t{0}, bucket * 3}) {
    for (const int64_t bits : {1, 4, 8}) {
      const int64_t size = x.size() - first;
      cgx::OwnedLayout owned;
      check(owned.build(of_sizes({size}, bits, bucket, options), 1).empty(),
            "special values: layout");
      const cgx::Layout layout = owned.view();
      const cgx::DType dtype = cgx::DType::kF32;
      std::vector<float> lost(size), expected_lost(size), scratch(owned.scratch_values());
      const void* in = x.data() + first;
      void *residual = lost.data(), *expected_residual = expected_lost.data();
      const uint32_t key[2] = {0, 0};
      Bytes payload(layout.chunk_bytes), expected(layout.chunk_bytes);
      cgx::current_kernels().encode({layout,
                                     {&in, &dtype},
                                     {&expected_residual, &dtype},
                                     key,
                                     -1,
                                     expected.data(),
                                     scratch.data()},
                                    0, layout.total_bytes());
      check(done(cgx::encode({layout,
                              {&in, &dtype},
                              {&residual, &dtype},
                              key,
                              {nullptr, -1},
                              payload.data(),
                              true},
                             {{0, layout.total_bytes()}}, nullptr)),
            "special values: encode");
      const std::string name = "special values, rounding " + std::to_string(options.rounding) +
                               (options.rotated ? ", rotated" : "");
      check(payload == expected, name + ": payload");
      check(std::memcmp(residual, expected_residual, 4 * size) == 0, name + ": residual");
    }
  }
}

// Metas that no encoder writes. A bucket that has one is decoded to NaNs of one kind, whatever NaN
// was received and whichever processor decodes. Masked values are 0 even there.
void strange_metas(Options options) {
  const std::vector<uint32_t> strange = {0x7fffffffu, 0xffc00000u, 0x7f800001u, 0x7f800000u,
                                         0xff800000u};
  const std::vector<cgx::DType> dtypes = {cgx::DType::kF32, cgx::DType::kBF16, cgx::DType::kF16};
  const std::vector<uint32_t> expected = {0x7fc00000u, 0x7fc0u, 0x7e00u};
  const int64_t bucket = 32, size = bucket * 2 * static_cast<int64_t>(strange.size());
  const uint16_t mask = 0x8001;  // the first segment and the last one, of two values each
  for (size_t d = 0; d < dtypes.size(); ++d) {
    cgx::OwnedLayout owned;
    check(owned.build(of_sizes({size}, 4, bucket, options), 1).empty(), "strange metas: layout");
    const cgx::Layout layout = owned.view();
    Bytes payload(layout.chunk_bytes, 0x5A);
    for (size_t k = 0; k < 2 * strange.size(); ++k) {
      uint32_t meta[2] = {0x3f800000u, 0x3f800000u};
      meta[k % 2] = strange[k / 2];
      meta[1] &= 0x7fffffffu;  // the sign of a unit says that it has a mask
      if (k % 3) meta[1] = 0x80000000u | (meta[1] & 0x7fff0000u) | mask;
      std::memcpy(&payload[k * cgx::Record{bucket, 4}.bytes()], meta, sizeof(meta));
    }
    const int64_t item = cgx::item_size(dtypes[d]);
    Bytes cpu(size * item), gpu(size * item), nan(size * item);
    for (int64_t i = 0; i < size; ++i) {
      const bool masked = i / bucket % 3 && (i + 2) % bucket < 4;
      if (!masked) std::memcpy(&nan[i * item], &expected[d], item);
    }
    std::vector<float> scratch(owned.scratch_values());
    void *cpu_out = cpu.data(), *gpu_out = gpu.data();
    cgx::current_kernels().decode({layout, payload.data(), {&cpu_out, &dtypes[d]}, scratch.data()},
                                  0, layout.total_bytes());
    check(done(cgx::decode({layout, payload.data(), {&gpu_out, &dtypes[d]}},
                           {{0, layout.total_bytes()}}, nullptr)),
          "strange metas: decode");
    const std::string name = std::string("strange metas") + (options.rotated ? ", rotated" : "") +
                             ", dtype " + std::to_string(d);
    check(cpu == nan, name + ": on the CPU");
    check(gpu == nan, name + ": emulated");
  }
}

constexpr int64_t kEndOfSegments = 1400;

// The end of a leaf of more than 2^32 values, where 32-bit offsets would wrap. The memory is only
// reserved; nothing but this end is ever touched.
void large_offsets(int64_t rotation, int64_t segment) {
  const int64_t size = (int64_t{1} << 32) + 1000, bytes = 4 * size;
  const auto reserve = [](int64_t n) {
    return static_cast<char*>(mmap(nullptr, n, PROT_READ | PROT_WRITE,
                                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  };
  cgx::OwnedLayout owned;
  check(owned.build({{size, 8, 512, 1, 0, rotation, segment}}, 2).empty(), "large offsets: layout");
  const cgx::Layout layout = owned.view();
  char *const x = reserve(bytes), *const y = reserve(bytes), *const z = reserve(bytes);
  char *const payload = reserve(2 * layout.chunk_bytes), *const expected =
                                                             reserve(2 * layout.chunk_bytes);
  for (const char* p : {x, y, z, payload, expected}) {
    if (p == MAP_FAILED) return check(false, "large offsets: no address space");
  }
  const int64_t from = layout.total_bytes() - 3000, first = size - 4000;
  float* const values = reinterpret_cast<float*>(x);
  // Zeros on one side of the place where long segments end.
  const int64_t end = size - kEndOfSegments;
  for (int64_t i = first; i < size; ++i) {
    values[i] = i >= end && i < end + 512 ? 0.0f : std::sin(static_cast<float>(i - first));
  }
  const cgx::DType dtype = cgx::DType::kF32;
  const void* in = x;
  void *out = y, *expected_out = z;
  const uint32_t key[2] = {1, 2};
  std::vector<float> scratch(owned.scratch_values());
  cgx::current_kernels().encode(
      {layout, {&in, &dtype}, {}, key, 0, reinterpret_cast<uint8_t*>(expected), scratch.data()},
      from, layout.total_bytes());
  check(done(cgx::encode({layout,
                          {&in, &dtype},
                          {},
                          key,
                          {nullptr, 0},
                          reinterpret_cast<uint8_t*>(payload),
                          false},
                         {{from, layout.total_bytes()}}, nullptr)),
        "large offsets: encode");
  const int64_t at = layout.payload_offset(1, layout.record_from(from));
  const int64_t length = layout.payload_offset(1, layout.total_bytes()) - at;
  check(length > 2000 && std::memcmp(payload + at, expected + at, length) == 0,
        "large offsets: payload");
  cgx::current_kernels().decode(
      {layout, reinterpret_cast<uint8_t*>(expected), {&expected_out, &dtype}, scratch.data()}, from,
      layout.total_bytes());
  check(done(cgx::decode({layout, reinterpret_cast<uint8_t*>(payload), {&out, &dtype}},
                         {{from, layout.total_bytes()}}, nullptr)),
        "large offsets: decode");
  check(std::memcmp(y + 4 * first, z + 4 * first, 4 * (size - first)) == 0,
        "large offsets: decoded values");
  for (char* p : {x, y, z}) munmap(p, bytes);
  for (char* p : {payload, expected}) munmap(p, 2 * layout.chunk_bytes);
}

}  // namespace

// Runs one of two parts, which take about as long. An argument chooses the second.
int main(int argc, char**) {
  check(done(cgx::load_kernels()), "kernels load");
  const int64_t made = emulator::made();
  std::mt19937 rng(3);
  emulator::set_seed(argc);
  if (argc == 1) {
    if (!kHalfOfTheCases) tables(rng, 0);
    launches(rng);
    for (const Options& options : kOptions) special_values(options);
    for (const Options& options : {kOptions[0], kOptions[3]}) strange_metas(options);
    const int64_t end = (int64_t{1} << 32) + 1000 - kEndOfSegments;
    for (const int64_t segment : {int64_t{0}, int64_t{50}, end / 1000, end / 2, end, 2 * end}) {
      for (const bool rotated : {false, true}) large_offsets(rotated, segment);
    }
  } else {
    tables(rng, 1);
  }
  check(emulator::made() == made, "all kernels have been loaded");
  return report();
}
