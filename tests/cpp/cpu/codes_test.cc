// The codes of one array on exact-size heap buffers. Every instruction set writes the same bytes,
// on one thread and on several.
#include <cmath>
#include <functional>
#include <limits>

#include "cases.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/select.h"
#include "cpu/worker_pool.h"

namespace {

using Bytes = std::vector<uint8_t>;

std::vector<float> values_of(int64_t n, std::mt19937& rng) {
  std::normal_distribution<float> normal;
  std::vector<float> x(n);
  for (float& v : x) v = normal(rng);
  const float edges[] = {0.0f, -0.0f, 1e-40f, std::numeric_limits<float>::infinity(), NAN, -NAN};
  for (int64_t i = 0; i < n; i += 97) x[i] = edges[i / 97 % 6];
  return x;
}

template <typename T>
Bytes bytes_of(const std::unique_ptr<T[]>& data, int64_t count) {
  const auto from = reinterpret_cast<const uint8_t*>(data.get());
  return {from, from + count * sizeof(T)};
}

// The places and values that `select` writes.
Bytes selected(int64_t count, const std::function<void(int32_t*, float*)>& select) {
  std::unique_ptr<int32_t[]> at(new int32_t[count]);
  std::unique_ptr<float[]> taken(new float[count]);
  select(at.get(), taken.get());
  Bytes both = bytes_of(at, count), values = bytes_of(taken, count);
  both.insert(both.end(), values.begin(), values.end());
  return both;
}

// What every code makes of `from` on so many threads.
std::vector<Bytes> all_codes(const std::vector<float>& from, int64_t threads) {
  const int64_t n = from.size();
  std::unique_ptr<float[]> x(new float[n]), y(new float[n]);
  std::copy(from.begin(), from.end(), x.get());
  cgx::WorkerPool pool(threads);
  const cgx::CodeKernels& codes = cgx::current_kernels().codes;
  std::vector<Bytes> out;
  std::unique_ptr<uint8_t[]> signs(new uint8_t[(n + 7) / 8]);
  codes.pack_signs(x.get(), n, signs.get());
  out.push_back(bytes_of(signs, (n + 7) / 8));
  for (const bool large : {false, true}) {
    codes.unpack_signs(signs.get(), n, large, y.get());
    out.push_back(bytes_of(y, n));
  }
  const uint32_t key[2] = {1, 2};
  for (const int64_t bucket : {512, 50}) {
    for (const int width : {0, 3, 4, 8}) {
      for (const auto coded : {cgx::Coded::kNatural, cgx::Coded::kTernary, cgx::Coded::kSteps}) {
        if ((width == 0) != (coded == cgx::Coded::kTernary)) continue;
        if (coded == cgx::Coded::kNatural && width != 8) continue;
        const int64_t packed = width == 0 ? (n + 4) / 5 : (n * width + 7) / 8;
        const int64_t scales = (n + bucket - 1) / bucket;
        std::unique_ptr<uint8_t[]> payload(new uint8_t[packed]), scale(new uint8_t[4 * scales]());
        cgx::BucketsCall call{coded, x.get(), n, key, payload.get(), scale.get(), bucket};
        call.levels = width == 0 ? 1 : (1 << (width - 1)) - 1;
        call.l2 = bucket == 512;
        call.width = width;
        cgx::encode_buckets(pool, 1, [&](int64_t) { return call; });
        out.push_back(bytes_of(payload, packed));
        out.push_back(bytes_of(scale, 4 * scales));
      }
    }
    for (const int64_t keep : {1, 5, 50}) {
      const int64_t buckets = (n + bucket - 1) / bucket;
      out.push_back(selected(buckets * keep, [&](int32_t* at, float* taken) {
        codes.largest_of_buckets(x.get(), n, bucket, keep, 0, buckets, at, taken);
      }));
    }
  }
  for (const int64_t count : {int64_t{1}, (n + 99) / 100, n}) {
    out.push_back(selected(count, [&](int32_t* at, float* taken) {
      cgx::largest(pool, x.get(), n, count, at, taken);
    }));
    const int32_t turns[2] = {static_cast<int32_t>(n / 2), static_cast<int32_t>(n / 3)};
    out.push_back(selected(count, [&](int32_t* at, float* taken) {
      cgx::above_sampled(x.get(), n, count, turns, 1, count, at, taken);
    }));
  }
  return out;
}

}  // namespace

int main() {
  std::mt19937 rng(0);
  for (const int64_t n : {1, 63, 65, 2561, 300000}) {
    const std::vector<float> x = values_of(n, rng);
    std::vector<Bytes> first;
    for (auto table = cgx::available_kernels(); *table; ++table) {
      cgx::select_kernels((*table)->isa);
      for (const int64_t threads : {1, 3}) {
        const std::vector<Bytes> made = all_codes(x, threads);
        if (first.empty()) first = made;
        for (size_t i = 0; i < made.size(); ++i) {
          check(made[i] == first[i], std::string((*table)->isa) + " code " + std::to_string(i) +
                                         " of " + std::to_string(n) + " values on " +
                                         std::to_string(threads) + " threads");
        }
      }
    }
  }
  return report();
}
