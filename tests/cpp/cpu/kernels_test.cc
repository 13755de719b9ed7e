// The kernels on exact-size heap buffers, also with payloads of random bytes from peers.
#include "cpu/kernels.h"

#include <cmath>

#include "cases.h"

namespace {

// Whether the zero segments of x are zeros of y, and without errors.
bool zeros_stay(const Buffers& x, const Buffers& y, const Buffers& residual) {
  bool stay = true;
  for (size_t k = 0; k < x.specs.size(); ++k) {
    const cgx::SlotSpec& leaf = x.specs[k];
    const int64_t item = cgx::item_size(x.dtypes[k]);
    const int64_t segment = leaf.segment ? leaf.segment : leaf.bucket_size / cgx::kMaskBits;
    const auto is_zero = [&](const Buffers& of, int64_t i) {
      uint32_t bits = 0;
      std::memcpy(&bits, static_cast<const char*>(of.data[k]) + i * item, item);
      return (bits & (item == 4 ? 0x7fffffffu : 0x7fffu)) == 0;
    };
    for (int64_t first = 0, end; first < leaf.size; first = end) {
      end = first + 1;
      const auto bucket = [&](int64_t i) { return i / leaf.bucket_size; };
      while (end < leaf.size && end % segment != 0 && bucket(end) == bucket(first)) ++end;
      bool zero = true;
      for (int64_t i = first; i < end; ++i) zero &= is_zero(x, i);
      for (int64_t i = first; zero && i < end; ++i) stay &= is_zero(y, i) && is_zero(residual, i);
    }
  }
  return stay;
}

void round_trip(const cgx::KernelTable& kernels, int64_t bits, int64_t bucket, int64_t rounding,
                bool rotation, int64_t segment, cgx::DType dtype, int64_t world,
                std::mt19937& rng) {
  const std::string name = std::string(kernels.isa) + " bits " + std::to_string(bits) + " bucket " +
                           std::to_string(bucket) + " rounding " + std::to_string(rounding) +
                           (rotation ? " rotated" : "") +
                           (segment ? " segment " + std::to_string(segment) : "") + " world " +
                           std::to_string(world);
  Buffers x(leaves_of(bits, bucket, rounding, rotation, segment), dtype, rng),
      y(x.specs, dtype, rng);
  Buffers residual(x.specs, dtype, rng);
  cgx::OwnedLayout owned;
  check(owned.build(x.specs, world).empty(), name + ": layout");
  const cgx::Layout layout = owned.view();
  const int64_t total = layout.total_bytes(), bytes = world * layout.chunk_bytes;
  const uint32_t key[2] = {1, 2};
  std::vector<float> scratch(owned.scratch_values());
  float* const own = scratch.data();
  std::unique_ptr<uint8_t[]> payload(new uint8_t[bytes]), again(new uint8_t[bytes]);
  cgx::zero_tails(layout, payload.get());
  cgx::zero_tails(layout, again.get());
  kernels.encode({layout, x.in(), residual.out(), key, -1, payload.get(), own}, 0, total);
  // Disjoint ranges write what one call writes.
  const int64_t cut = total / 3;
  const cgx::LeavesOut none{nullptr, nullptr};
  kernels.encode({layout, x.in(), none, key, -1, again.get(), own}, 0, cut);
  kernels.encode({layout, x.in(), none, key, -1, again.get(), own}, cut, total);
  check(std::memcmp(payload.get(), again.get(), bytes) == 0, name + ": ranges");
  kernels.decode({layout, payload.get(), y.out(), own}, 0, total);
  // Results that are written past the caches, like those of large calls, are the same.
  cgx::Layout large = layout;
  large.values = int64_t{1} << 40;
  Buffers nontemporal(x.specs, dtype, rng);
  kernels.encode({large, x.in(), nontemporal.out(), key, -1, again.get(), own}, 0, total);
  check(std::memcmp(payload.get(), again.get(), bytes) == 0, name + ": nontemporal payload");
  check(nontemporal == residual, name + ": nontemporal residual");
  kernels.decode({large, payload.get(), nontemporal.out(), own}, 0, total);
  check(nontemporal == y, name + ": nontemporal decode");
  // Units of 1 change nothing, however many rows they have. The arrays have exactly their size.
  for (const bool one_row : {true, false}) {
    std::vector<std::vector<float>> arrays;
    std::vector<cgx::LeafUnits> units;
    for (const auto& leaf : x.specs) {
      const int64_t rows = one_row ? 1 : leaf.size % 3 ? leaf.size : leaf.size / 3;
      const int64_t columns = one_row ? leaf.size : leaf.size % 3 ? 1 : 3;
      const float* const ones = arrays.emplace_back(2 * (rows + columns), 1.0f).data();
      units.push_back({ones, ones + rows, columns, rows + columns});
    }
    for (const auto& of : {layout, large}) {
      kernels.encode({of, x.in(), nontemporal.out(), key, -1, again.get(), own, units.data()}, 0,
                     total);
      check(std::memcmp(payload.get(), again.get(), bytes) == 0, name + ": payload in units");
      check(nontemporal == residual, name + ": residual in units");
      kernels.decode({of, payload.get(), nontemporal.out(), own, units.data()}, 0, total);
      check(nontemporal == y, name + ": decode in units");
    }
  }
  if (dtype == cgx::DType::kF32 && !rotation) {
    bool exact = true;
    for (size_t k = 0; k < x.specs.size(); ++k) {
      const float* a = static_cast<const float*>(x.data[k]);
      const float* b = static_cast<const float*>(y.data[k]);
      const float* r = static_cast<const float*>(residual.data[k]);
      for (int64_t i = 0; i < x.specs[k].size; ++i) exact &= (a[i] - b[i] == r[i]);
    }
    check(exact, name + ": residual");
  }
  check(zeros_stay(x, y, residual), name + ": zeros");
  // Arbitrary bytes from the peers: any numbers may come out, but no byte outside may be touched.
  const auto bad = noise(bytes, rng);
  for (int64_t rank = 0; rank < world; ++rank) {
    std::unique_ptr<uint8_t[]> chunk(new uint8_t[layout.chunk_bytes]);
    kernels.reduce({layout, x.in(), key, rank, bad.get(), 3.0f, chunk.get(), own, residual.out()},
                   layout.begin[rank], layout.begin[rank + 1]);
  }
  kernels.decode({layout, bad.get(), y.out(), own}, 0, total);
  if (world == 1) {
    const auto peers = noise(3 * total, rng);
    kernels.accumulate({layout, x.in(), peers.get(), 3, 1, 1.0f, y.out(), own}, 0, total);
    kernels.accumulate({large, x.in(), peers.get(), 3, 1, 1.0f, nontemporal.out(), own}, 0, total);
    check(nontemporal == y, name + ": nontemporal sum");
    // Without leaves the payloads are added to zeros.
    Buffers zeros(x.specs, dtype, rng);
    for (size_t k = 0; k < zeros.data.size(); ++k) {
      std::memset(zeros.data[k], 0, zeros.specs[k].size * cgx::item_size(dtype));
    }
    kernels.accumulate({layout, zeros.in(), peers.get(), 3, -1, 3.0f, y.out(), own}, 0, total);
    for (const auto& of : {layout, large}) {
      const cgx::LeavesIn nothing{nullptr, nullptr};
      kernels.accumulate({of, nothing, peers.get(), 3, -1, 3.0f, nontemporal.out(), own}, 0, total);
      check(nontemporal == y, name + ": the payloads' sum");
    }
  }
  check(true, name + ": corrupted payloads");
}

void poison(const cgx::KernelTable& kernels) {
  for (float bad : {NAN, INFINITY, -INFINITY}) {
    for (int64_t place : {0, 31, 63}) {
      std::vector<float> x(64, 1.0f), y(64, 0.0f);
      x[place] = bad;
      cgx::OwnedLayout owned;
      check(owned.build({{64, 4, 32, 0, 0}}, 1).empty(), "poison: layout");
      const cgx::Layout layout = owned.view();
      std::vector<uint8_t> payload(layout.chunk_bytes);
      const uint32_t key[2] = {0, 0};
      const void* in = x.data();
      void* out = y.data();
      const cgx::DType dtype = cgx::DType::kF32;
      kernels.encode({layout, {&in, &dtype}, {nullptr, nullptr}, key, -1, payload.data(), nullptr},
                     0, layout.total_bytes());
      kernels.decode({layout, payload.data(), {&out, &dtype}, nullptr}, 0, layout.total_bytes());
      bool ok = true;
      for (int64_t i = 0; i < 64; ++i) ok &= (std::isnan(y[i]) == (i / 32 == place / 32));
      check(ok, std::string(kernels.isa) + ": poison at " + std::to_string(place));
    }
  }
}

}  // namespace

int main() {
  std::mt19937 rng(1);
  for (auto kernels = cgx::available_kernels(); *kernels; ++kernels) {
    poison(**kernels);
    for (int64_t bits = 1; bits <= 8; ++bits) {
      for (int64_t bucket : {32, 96, 512}) {
        for (int64_t world : {1, 3}) {
          for (auto dtype : {cgx::DType::kF32, cgx::DType::kBF16, cgx::DType::kF16}) {
            for (const bool rotation : {false, true}) {
              const int64_t rounding = (bits + bucket / 32 + world + rotation) % 3;
              const int64_t kind = bits + world + 3 * rotation;
              const int64_t segment = kind % 4 == 0 ? 0 : segment_of(bucket, kind);
              round_trip(**kernels, bits, bucket, rounding, rotation, segment, dtype, world, rng);
            }
          }
        }
      }
    }
  }
  return report();
}
