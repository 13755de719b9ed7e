// Converts buckets of any dtype to fp32 values for encoding and back, and multiplies by their
// units. Included only by cpu/kernels.cc; everything lives in the instruction set's namespace.
#ifndef CGX_CPU_UNITS_H_
#define CGX_CPU_UNITS_H_

#include "cpu/buckets.h"

namespace cgx {
inline namespace CGX_ISA {
namespace {

// Loads `live` values, at most one vector. The other lanes repeat the first value.
template <typename Store>
CGX_HD F32 load_part(const typename Store::Item* from, int64_t live) {
  typename Store::Item item[kLanes];
  for (int64_t l = 0; l < kLanes; ++l) item[l] = from[l < live ? l : 0];
  return Store::load_lanes(item);
}
template <typename Store>
CGX_HD void store_part(typename Store::Item* to, F32 x, int64_t live) {
  typename Store::Item item[kLanes];
  Store::store_lanes(item, x);
  for (int64_t l = 0; l < live; ++l) to[l] = item[l];
}

// The factors of a leaf's values for one way.
class Factors {
 public:
  Factors(const LeafUnits* units, int64_t leaf, Way way) {
    if (units == nullptr || units[leaf].rows == nullptr) return;
    const LeafUnits& own = units[leaf];
    rows_ = own.rows + way * own.to_out;
    columns_ = own.columns + way * own.to_out;
    num_columns_ = own.num_columns;
  }
  CGX_HD bool none() const { return rows_ == nullptr; }
  CGX_HD bool long_rows() const { return num_columns_ >= kRowValues; }
  // Splits `count` values from number `first` on into pieces that each lie in one row. Calls
  // f(i, here, columns, row) for each piece: `here` values, starting i values after `first`.
  template <typename F>
  CGX_HD void each_row(int64_t first, int64_t count, F f) const {
    int64_t row = first / num_columns_, column = first - row * num_columns_;
    for (int64_t i = 0; i < count; column = 0, ++row) {
      const int64_t rest = num_columns_ - column, here = rest < count - i ? rest : count - i;
      f(i, here, columns_ + column, rows_[row]);
      i += here;
    }
  }
  // Writes the factors of `count` values from number `first` on.
  __attribute__((noinline)) void fill(int64_t first, int64_t count, float* out) const {
    each_row(first, count, [&](int64_t at, int64_t here, const float* from, float row) {
      int64_t i = 0;
      for (; i + kLanes <= here; i += kLanes) {
        prefetch_l2<kLanes * 4>((const char*)(from + i) + kFarAhead);
        store(out + at + i, load<F32>(from + i) * row);
      }
      for (; i < here; ++i) out[at + i] = row * from[i];
    });
  }

 private:
  static constexpr int64_t kRowValues = 128;  // from this length on, a row is worth its own loop
  const float* rows_ = nullptr;
  const float* columns_ = nullptr;
  int64_t num_columns_ = 0;
};

// Calls f(i, count, factor, row) for runs that make up `n` values. factor[0] * row is the factor of
// value `first` + i. Rows that are too short for vectors are multiplied beforehand.
template <typename F>
CGX_HD void for_each_factor(const Factors& factors, int64_t first, int64_t n, F f) {
  if (factors.long_rows()) return factors.each_row(first, n, f);
  float factor[kUsualValues];
  for (int64_t i = 0; i < n; i += kUsualValues) {
    const int64_t count = n - i < kUsualValues ? n - i : kUsualValues;
    factors.fill(first + i, count, factor);
    f(i, count, factor, 1.0f);
  }
}

// Writes values [first, first + n) of a leaf to `out`, as they are encoded except for the rotation.
// Returns their extremes.
template <typename Store>
__attribute__((noinline)) Extremes read_values(const typename Store::Item* x, int64_t n,
                                               const Factors& factors, int64_t first, float* out) {
  Range range;
  const auto read = [&](int64_t at, int64_t count, const float* factor, float row) {
    const typename Store::Item* const from = x + at;
    const auto put = [&](int64_t i, int64_t live, F32 value, F32 by, int chain) {
      if (factor) value *= by * row;
      range.add(chain, value);
      live == kLanes ? store(out + at + i, value) : store_part<StoreF32>(out + at + i, value, live);
    };
    constexpr int kChains = Range::kChains;
    const F32 none = {};
    int64_t i = 0;
    for (; i + kChains * kLanes <= count; i += kChains * kLanes) {
      prefetch_l2<kChains * kLanes * sizeof(*x)>((const char*)(from + i) + kFarAhead);
      if (factor) prefetch_l2<kChains * kLanes * 4>((const char*)(factor + i) + kFarAhead);
#pragma GCC unroll 4
      for (int c = 0; c < kChains; ++c) {
        const int64_t j = i + c * kLanes;
        put(j, kLanes, Store::load_lanes(from + j), factor ? load<F32>(factor + j) : none, c);
      }
    }
    for (; i < count; i += kLanes) {
      const int64_t live = count - i < kLanes ? count - i : kLanes;
      put(i, live, load_part<Store>(from + i, live),
          factor ? load_part<StoreF32>(factor + i, live) : none, 0);
    }
  };
  factors.none() ? read(0, n, nullptr, 1.0f) : for_each_factor(factors, first, n, read);
  return range.extremes<StoreF32>(out, n);
}

// Writes after(before(x) * factor), or before(x) if there are no factors.
template <typename Store, typename Before, typename After>
CGX_HD void write_values(const float* x, int64_t n, const Factors& factors, int64_t first,
                         typename Store::Item* out, Before before, After after) {
  const auto write = [&](int64_t at, int64_t count, const float* factor, float row) {
    const float* const from = x + at;
    typename Store::Item* const to = out + at;
    const auto value = [&](F32 v, F32 by) {
      return factor ? after(before(v) * (by * row)) : before(v);
    };
    const F32 none = {};
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      if (factor) prefetch_l2<kLanes * 4>((const char*)(factor + i) + kFarAhead);
      Store::store_lanes(to + i, value(load<F32>(from + i), factor ? load<F32>(factor + i) : none));
    }
    const int64_t live = count - i;
    if (live == 0) return;
    const F32 by = factor ? load_part<StoreF32>(factor + i, live) : none;
    store_part<Store>(to + i, value(load_part<StoreF32>(from + i, live), by), live);
  };
  factors.none() ? write(0, n, nullptr, 1.0f) : for_each_factor(factors, first, n, write);
}

// The inverse of read_values for encoding errors: writes values times `scale` and their factors.
template <typename Store>
__attribute__((noinline)) void write_lost(const float* x, int64_t n, float scale,
                                          const Factors& factors, int64_t first,
                                          typename Store::Item* out) {
  const auto times = [&](F32 v) { return canonical_nan(v * scale); };
  write_values<Store>(x, n, factors, first, out, times, [](F32 v) { return canonical_nan(v); });
}

// Keeps a decoded value finite that was multiplied by its factor: rounding may take it past the
// largest value of fp32 or of its dtype. NaN stays NaN.
template <typename Store>
CGX_HD F32 finite_of(F32 v) {
  v = finite_or_nan(v);
  if (Store::kMost == kLargest) return v;
  const F32 most = F32{} + Store::kMost;
  return Lanes<F32>::greater(Lanes<F32>::lesser(v, most), -most);
}

// The inverse of read_values for decoded values.
template <typename Store>
__attribute__((noinline)) void write_decoded(const float* x, int64_t n, const Factors& factors,
                                             int64_t first, typename Store::Item* out) {
  const auto before = [](F32 v) { return finite_or_nan(v); };
  write_values<Store>(x, n, factors, first, out, before, finite_of<Store>);
}

}  // namespace
}  // namespace CGX_ISA
}  // namespace cgx

#endif  // CGX_CPU_UNITS_H_
