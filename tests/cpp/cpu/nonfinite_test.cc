// The search through the ranges of buckets finds what a look at every value finds. Runs on several
// threads, in exact-size heap buffers.
#include "cpu/nonfinite.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cases.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/worker_pool.h"

namespace {

using cgx::DType;

constexpr int64_t kWorld = 3;

bool is_finite(const void* data, DType dtype, int64_t i) {
  if (dtype == DType::kF32) return std::isfinite(static_cast<const float*>(data)[i]);
  const uint16_t exponent = dtype == DType::kBF16 ? 0x7f80 : 0x7c00;
  return (static_cast<const uint16_t*>(data)[i] & exponent) != exponent;
}

// How many values of each leaf are not finite, and the place of the first.
std::vector<int32_t> counted(const Buffers& leaves) {
  std::vector<int32_t> pairs;
  for (size_t k = 0; k < leaves.specs.size(); ++k) {
    int32_t count = 0, first = 0;
    for (int64_t i = 0; i < leaves.specs[k].size; ++i) {
      if (is_finite(leaves.data[k], leaves.dtypes[k], i)) continue;
      if (count++ == 0) first = static_cast<int32_t>(i);
    }
    pairs.push_back(count);
    pairs.push_back(first);
  }
  return pairs;
}

// Turns one value in `every` into a NaN or an infinity.
void spoil(Buffers& leaves, int64_t every) {
  for (size_t k = 0; k < leaves.specs.size(); ++k) {
    for (int64_t i = every / 2; i < leaves.specs[k].size; i += every) {
      const float f32 = i % 2 ? NAN : -std::numeric_limits<float>::infinity();
      const uint16_t half = leaves.dtypes[k] == DType::kBF16 ? 0xff80 : 0x7c01;
      if (leaves.dtypes[k] == DType::kF32) {
        std::memcpy(static_cast<char*>(leaves.data[k]) + 4 * i, &f32, 4);
      } else {
        std::memcpy(static_cast<char*>(leaves.data[k]) + 2 * i, &half, 2);
      }
    }
  }
}

std::vector<int32_t> found(const cgx::FindCall& call, cgx::WorkerPool& pool) {
  std::vector<int32_t> pairs(2 * call.layout.num_slots, -1);
  cgx::NonFiniteTable table(pairs.data(), call.layout.num_slots, 2);
  cgx::split_range(pool, 1, 0, call.layout.total_bytes(), 7,
                   [&](int64_t, int64_t first, int64_t last, int64_t) {
                     cgx::find_nonfinite(call, first, last, table);
                   });
  return pairs;
}

void run(DType dtype, int64_t rotation, int64_t every, std::mt19937& rng) {
  const std::vector<cgx::SlotSpec> specs = {{1, 4, 512, 0, 0, rotation},
                                            {5000, 4, 512, 0, 1, rotation},
                                            {777, 3, 96, 0, 2, rotation},
                                            {0, 8, 64, 0, 3, rotation}};
  cgx::WorkerPool pool(3);
  Buffers in(specs, dtype, rng), out(specs, dtype, rng);
  if (every) spoil(in, every);
  cgx::OwnedLayout owned;
  owned.build(specs, kWorld);
  const cgx::Layout layout = owned.view();
  std::unique_ptr<uint8_t[]> payload(new uint8_t[kWorld * layout.chunk_bytes]);
  std::unique_ptr<float[]> scratch(new float[owned.longest_bucket()]);
  const uint32_t key[2] = {1, 2};
  const cgx::KernelTable& kernels = cgx::current_kernels();
  kernels.encode({layout, in.in(), {nullptr, nullptr}, key, -1, payload.get(), scratch.get()}, 0,
                 layout.total_bytes());
  kernels.decode({layout, payload.get(), out.out(), scratch.get()}, 0, layout.total_bytes());
  const std::string name = "dtype " + std::to_string(static_cast<int>(dtype)) + ", rotation " +
                           std::to_string(rotation) + ", every " + std::to_string(every);
  const auto of = [&](const Buffers& leaves, int64_t own, const uint8_t* row) {
    return cgx::FindCall{layout, leaves.in(), payload.get(), 1, own, row, nullptr};
  };
  check(found(of(in, -1, nullptr), pool) == counted(in), name + ": what went in");
  check(found(of(out, -1, nullptr), pool) == counted(out), name + ": what came out");
  check((found(of(in, -1, nullptr), pool)[2] > 0) == (every > 0), name + ": something went in");

  // The records of one chunk lie elsewhere, and its row in the payload holds only zeros.
  const int64_t own = 1;
  std::unique_ptr<uint8_t[]> row(new uint8_t[layout.chunk_bytes]);
  uint8_t* const at = payload.get() + own * layout.chunk_bytes;
  std::copy_n(at, layout.chunk_bytes, row.get());
  std::fill_n(at, layout.chunk_bytes, uint8_t{0});
  check(found(of(in, own, row.get()), pool) == counted(in), name + ": own records elsewhere");
}

// Peers whose values are finite but whose sum is not, and a leaf that no range bounds.
void sums(std::mt19937& rng) {
  cgx::WorkerPool pool(2);
  const std::vector<cgx::SlotSpec> specs = {{6000, 8, 64, 0, 0, 0}};
  Buffers leaf(specs, DType::kF32, rng);
  spoil(leaf, 2100);
  cgx::OwnedLayout owned;
  owned.build(specs, 1);
  const cgx::Layout layout = owned.view();
  const int64_t peers = 3, row = layout.total_bytes();
  std::vector<uint8_t> payload(peers * row);
  for (const float low : {1.0f, -1e38f}) {
    for (int64_t p = 0; p < peers; ++p) {
      for (int64_t bucket = 0; bucket < layout.slots[0].buckets(); ++bucket) {
        const cgx::Meta meta{low, 0.0f};
        std::memcpy(payload.data() + p * row + layout.slots[0].record_start(bucket), &meta, 8);
      }
    }
    const cgx::FindCall call{layout, leaf.in(), payload.data(), peers, -1, nullptr, nullptr};
    const std::vector<int32_t> none = {0, 0};
    check(found(call, pool) == (low < 0 ? counted(leaf) : none),
          "peers of " + std::to_string(low) + " are added up");
  }
  const uint8_t unbounded = 1;
  std::fill(payload.begin(), payload.end(), uint8_t{0});
  const cgx::FindCall call{layout, leaf.in(), payload.data(), peers, -1, nullptr, &unbounded};
  check(found(call, pool) == counted(leaf), "a leaf that no range bounds is looked at");
  const cgx::FindCall unknown{layout, leaf.in(), nullptr, 0, -1, nullptr, nullptr};
  check(found(unknown, pool) == counted(leaf), "without payloads all is looked at");
}

void large_counts() {
  int32_t pair[2] = {-1, -1};
  cgx::NonFiniteTable table(pair, 1, 2);
  check(pair[0] == 0 && pair[1] == 0, "a table starts with nothing");
  table.add(0, int64_t{1} << 40, int64_t{1} << 33);
  check(pair[0] == INT32_MAX && pair[1] == INT32_MAX, "numbers that do not fit are the largest");
  table.add(0, 5, 12);
  check(pair[0] == INT32_MAX && pair[1] == 12, "the first place wins");
}

}  // namespace

int main() {
  std::mt19937 rng(1);
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const int64_t rotation : {0, 1}) {
      for (const int64_t every : {0, 1, 400}) run(dtype, rotation, every, rng);
    }
  }
  sums(rng);
  large_counts();
  return report();
}
