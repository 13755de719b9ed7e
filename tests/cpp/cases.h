// What the C++ tests share: counted checks, and leaves in heap blocks of exactly their size, so
// that the address sanitizer sees every byte read or written outside them.
#ifndef CGX_TESTS_CASES_H_
#define CGX_TESTS_CASES_H_

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "format/layout.h"
#include "format/leaves.h"

namespace {

// The thread sanitizer looks for races, and half of the cases show these as well. Under the address
// sanitizer, all cases compare bytes.
#if defined(__SANITIZE_THREAD__)
constexpr bool kHalfOfTheCases = true;
#else
constexpr bool kHalfOfTheCases = false;
#endif

int passed = 0, failed = 0;

void check(bool ok, const std::string& what) {
  ok ? ++passed : ++failed;
  if (!ok) std::printf("FAILED: %s\n", what.c_str());
}

// Segments of a leaf: every second kind divides the bucket or is as long.
[[maybe_unused]] int64_t segment_of(int64_t bucket, int64_t kind) {
  const int64_t shortest = bucket / cgx::kMaskBits;
  const int64_t kinds[] = {shortest,   (bucket - 2) / 15 + 3,  // 37 for a bucket of 512
                           bucket / 4, (bucket - 1) / 10,      // 51
                           bucket,     5 * bucket / 2 + 3};
  return std::max(shortest, kinds[kind % 6]);
}

// Sets values of most leaves to 0 or -0: single ones, segments, and whole buckets. Half of them are
// the same on every rank, which has a generator of its own.
[[maybe_unused]] void plant_zeros(const cgx::SlotSpec& leaf, cgx::DType dtype, std::mt19937& rng,
                                  char* values) {
  const int64_t item = cgx::item_size(dtype);
  std::mt19937 common(static_cast<uint32_t>(31 * leaf.size + leaf.number));
  if (common() % 3 == 0) return;
  const auto plant = [&](int64_t length, uint32_t one_in) {
    for (int64_t i = 0; i < leaf.size; i += length) {
      const bool everywhere = common() % one_in == 0, here = rng() % one_in == 0;
      if (!everywhere && !here) continue;
      const int64_t end = std::min(i + length, leaf.size);
      std::memset(values + i * item, 0, (end - i) * item);
      for (int64_t k = i; k < end; ++k) values[(k + 1) * item - 1] = rng() % 2 ? char(0x80) : 0;
    }
  };
  const uint32_t few = common() % 2 ? 4 : 60;
  plant(1, 40);
  plant(leaf.segment ? leaf.segment : leaf.bucket_size / cgx::kMaskBits, few);
  plant(leaf.bucket_size, 2 * few);
}

// Leaves of every length around a bucket's, each in a heap block of exactly its size.
struct Buffers {
  std::vector<cgx::SlotSpec> specs;
  std::vector<cgx::DType> dtypes;
  std::vector<std::unique_ptr<char[]>> blocks;
  std::vector<void*> data;

  Buffers(const std::vector<cgx::SlotSpec>& leaves, cgx::DType dtype, std::mt19937& rng,
          bool zeros = true)
      : specs(leaves), dtypes(leaves.size(), dtype) {
    std::normal_distribution<float> normal;
    for (const auto& leaf : leaves) {
      const size_t bytes = leaf.size * cgx::item_size(dtype);
      blocks.emplace_back(new char[bytes]);
      data.push_back(blocks.back().get());
      for (int64_t i = 0; i < leaf.size; ++i) {
        const float x = normal(rng);
        uint32_t word;
        std::memcpy(&word, &x, 4);
        if (dtype == cgx::DType::kF32) std::memcpy(blocks.back().get() + 4 * i, &x, 4);
        // The upper half of an fp32 word is a bf16; as an f16 it is an arbitrary finite number.
        const uint16_t half = (word >> 16) & 0xBBFF;
        if (dtype != cgx::DType::kF32) std::memcpy(blocks.back().get() + 2 * i, &half, 2);
      }
      if (zeros) plant_zeros(leaf, dtype, rng, blocks.back().get());
    }
  }
  cgx::LeavesIn in() const { return {data.data(), dtypes.data()}; }
  cgx::LeavesOut out() const { return {data.data(), dtypes.data()}; }
  bool operator==(const Buffers& other) const {
    bool same = true;
    for (size_t k = 0; k < specs.size(); ++k) {
      same &= std::memcmp(data[k], other.data[k], specs[k].size * cgx::item_size(dtypes[k])) == 0;
    }
    return same;
  }
};

// Copies of leaves in heap blocks of exactly their size. With `shift`, they start one item later
// than malloc's alignment.
struct Copies {
  std::vector<std::unique_ptr<char[]>> blocks;
  std::vector<int64_t> bytes;
  std::vector<cgx::DType> dtypes;
  std::vector<void*> data;

  Copies(const std::vector<cgx::SlotSpec>& leaves, const std::vector<cgx::DType>& dtypes,
         const std::vector<void*>& from, bool shift)
      : dtypes(dtypes) {
    for (size_t k = 0; k < leaves.size(); ++k) {
      const int64_t item = cgx::item_size(dtypes[k]), before = shift ? item : 0;
      bytes.push_back(leaves[k].size * item);
      blocks.emplace_back(new char[before + bytes[k]]);
      data.push_back(blocks[k].get() + before);
      if (bytes[k] > 0) std::memcpy(data[k], from[k], bytes[k]);
    }
  }
  cgx::LeavesIn in() const { return {data.data(), dtypes.data()}; }
  cgx::LeavesOut out() const { return {data.data(), dtypes.data()}; }
  bool operator==(const std::vector<void*>& others) const {
    for (size_t k = 0; k < data.size(); ++k) {
      if (bytes[k] > 0 && std::memcmp(data[k], others[k], bytes[k]) != 0) return false;
    }
    return true;
  }
};

// Units of leaves, and the numbers behind them.
struct SomeUnits {
  std::vector<std::vector<float>> numbers;

  // Units of `leaves`, for every other one.
  std::vector<cgx::LeafUnits> of(const std::vector<cgx::SlotSpec>& leaves, std::mt19937& rng) {
    std::vector<cgx::LeafUnits> units(leaves.size());
    for (size_t k = 0; k < leaves.size(); k += 2) units[k] = of(leaves[k].size, rng);
    return units;
  }
  // Units of a leaf of that many values. The factors out of them are no powers of two.
  cgx::LeafUnits of(int64_t size, std::mt19937& rng) {
    int64_t rows = 40;
    while (size % rows != 0) --rows;
    const int64_t columns = size / rows, count = rows + columns;
    auto& both = numbers.emplace_back(2 * count);
    for (int64_t i = 0; i < count; ++i) {
      both[count + i] = 1 + static_cast<float>(rng() % 1000) / 300;
      both[i] = 1 / both[count + i];
    }
    return {both.data(), both.data() + rows, columns, count};
  }
};

[[maybe_unused]] std::vector<cgx::SlotSpec> leaves_of(int64_t bits, int64_t bucket,
                                                      int64_t rounding, int64_t rotation = 0,
                                                      int64_t segment = 0) {
  std::vector<cgx::SlotSpec> specs;
  int64_t number = 0;
  for (int64_t size :
       {int64_t{0}, int64_t{1}, int64_t{31}, bucket - 1, bucket, bucket + 1, 3 * bucket + 33}) {
    specs.push_back({size, bits, bucket, rounding, number++, rotation, segment});
  }
  return specs;
}

[[maybe_unused]] bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

[[maybe_unused]] std::unique_ptr<uint8_t[]> noise(int64_t bytes, std::mt19937& rng) {
  std::unique_ptr<uint8_t[]> block(new uint8_t[bytes]);
  for (int64_t i = 0; i < bytes; ++i) block[i] = static_cast<uint8_t>(rng());
  return block;
}

// Prints the counts. Returns the exit code of main.
int report() {
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed != 0;
}

}  // namespace

#endif  // CGX_TESTS_CASES_H_
