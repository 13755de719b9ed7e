// Compiled once for each instruction set, with CGX_ISA naming it. No std templates and no shared
// inline functions here: a linker must never pick one build's code for another.
#include "kernels_cpu.h"

#include <string.h>

#include "vector.h"

namespace cgx {
inline namespace CGX_ISA {
namespace {

constexpr int64_t kGroupValues = 1024;  // ranges of this many values first, then codes out of L1
constexpr int64_t kMaxGroup = kGroupValues / kTailValues;

// A pass that computes leaves the memory idle, and the processor's own prefetcher stops at pages.
// So memory is asked for by hand: into L2 far ahead, into L1 one group ahead.
constexpr int64_t kFarAhead = 32768;
constexpr int64_t kNearAhead = kGroupValues * 4;

// A call over more values than this does not fit a last-level cache: its results go past the
// caches, which spares the processor from reading the lines that it is about to overwrite.
constexpr int64_t kStreamValues = 8 << 20;

// Columns of a full bucket of the default size. The loops below are compiled once for it, with
// every stride known and no edges, and once for any size (kColumns = 0).
constexpr int kUsualColumns = 64;
constexpr int64_t kUsualValues = kRows * kUsualColumns;
CGX_HD bool usual(Record record) { return record.values == kUsualValues; }

// Where results wait in L1 until whole lines of them can go past the caches.
template <int64_t kBytes>
struct Stage {
  alignas(kLine) uint8_t bytes[kBytes + kLine];

  // The place of bytes that belong at `to`: as far from a line's start as that.
  template <typename T>
  CGX_HD T* at(T* to) {
    return (T*)(bytes + (uintptr_t)to % kLine);
  }
  CGX_HD void stream_to(void* target, int64_t size) const {
    uint8_t* const to = (uint8_t*)target;
    const uint8_t* const from = bytes + (uintptr_t)to % kLine;
    int64_t i = (kLine - (uintptr_t)to % kLine) % kLine;
    if (i > size) i = size;
    memcpy(to, from, i);
    for (; i + kLine <= size; i += kLine) stream_line(to + i, from + i);
    memcpy(to + i, from + i, size - i);
  }
};

// kLanes columns of a bucket. At a bucket's edge some columns or row ends do not exist.
struct Tile {
  int64_t stride;  // columns of the bucket
  int64_t values;  // of the bucket
  int64_t column;  // the tile's first

  CGX_HD int64_t width() const { return stride - column < kLanes ? stride - column : kLanes; }
  CGX_HD int64_t first(int r) const { return r * stride + column; }
  CGX_HD bool full() const {
    return stride - column >= kLanes && first(kRows - 1) + kLanes <= values;
  }
  // How many values row r has here.
  CGX_HD int64_t live(int r) const {
    const int64_t rest = values - first(r);
    return rest < 0 ? 0 : rest < width() ? rest : width();
  }
};

// Rows of kLanes items that stand in for a tile at a bucket's edge.
template <typename Item>
struct Edge {
  Item row[kRows * kLanes];

  __attribute__((noinline)) void read(const Item* bucket, const Tile& tile, Item pad) {
    for (int r = 0; r < kRows; ++r) {
      const int64_t live = tile.live(r);
      for (int64_t i = 0; i < kLanes; ++i) {
        row[r * kLanes + i] = i < live ? bucket[tile.first(r) + i] : pad;
      }
    }
  }
  __attribute__((noinline)) void write(Item* bucket, const Tile& tile) const {
    for (int r = 0; r < kRows; ++r) {
      const int64_t live = tile.live(r);
      for (int64_t i = 0; i < live; ++i) bucket[tile.first(r) + i] = row[r * kLanes + i];
    }
  }
};

// The same for the planes' bytes.
struct EdgeCodes {
  uint8_t plane[kMaxBits * kLanes];

  __attribute__((noinline)) void read(const uint8_t* planes, const Tile& tile, int bits) {
    for (int j = 0; j < bits; ++j) {
      for (int64_t i = 0; i < kLanes; ++i) {
        plane[j * kLanes + i] =
            i < tile.width() ? planes[j * tile.stride + tile.column + i] : uint8_t{0};
      }
    }
  }
  __attribute__((noinline)) void write(uint8_t* planes, const Tile& tile, int bits) const {
    for (int j = 0; j < bits; ++j) {
      for (int64_t i = 0; i < tile.width(); ++i) {
        planes[j * tile.stride + tile.column + i] = plane[j * kLanes + i];
      }
    }
  }
};

template <typename Store>
__attribute__((noinline)) bool all_finite(const typename Store::Item* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    typename Store::Item item[kLanes] = {x[i]};
    if ((bit_cast<U32>(Store::load_lanes(item))[0] & 0x7f800000u) == 0x7f800000u) return false;
  }
  return true;
}

// The sum of the values tells a NaN or Inf for the price of one addition; finite values may
// overflow it too, and are then looked at one by one.
template <typename Store, bool kFar>
__attribute__((noinline)) Meta find_meta(const typename Store::Item* x, int64_t n, int bits) {
  constexpr int kChains = 4;
  const float inf = bit_cast<float>(0x7f800000u);
  F32 lo[kChains], hi[kChains], sum[kChains];
  for (int c = 0; c < kChains; ++c) lo[c] = F32{} + inf, hi[c] = F32{} - inf, sum[c] = F32{};
  int64_t i = 0;
  for (; i + kChains * kLanes <= n; i += kChains * kLanes) {
    if (kFar) prefetch_l2<kChains * kLanes * sizeof(x[0])>((const char*)(x + i) + kFarAhead);
#pragma GCC unroll 4
    for (int c = 0; c < kChains; ++c) {
      const F32 v = Store::load_lanes(x + i + c * kLanes);
      lo[c] = min_of(lo[c], v);
      hi[c] = max_of(hi[c], v);
      sum[c] += v;
    }
  }
  for (; i < n; i += kLanes) {
    typename Store::Item item[kLanes];
    const int64_t live = n - i < kLanes ? n - i : kLanes;
    for (int l = 0; l < kLanes; ++l) item[l] = x[i + (l < live ? l : 0)];
    const F32 v = Store::load_lanes(item);
    lo[0] = min_of(lo[0], v);
    hi[0] = max_of(hi[0], v);
    sum[0] += v;
  }
  const float total = across<Add>((sum[0] + sum[1]) + (sum[2] + sum[3]));
  const float min = across<Min>(min_of(min_of(lo[0], lo[1]), min_of(lo[2], lo[3])));
  const float max = across<Max>(max_of(max_of(hi[0], hi[1]), max_of(hi[2], hi[3])));
  const bool finite = (total <= kLargest && total >= -kLargest) || all_finite<Store>(x, n);
  return make_meta(min, max, finite, bits);
}

// `ahead` is where this bucket's share of the memory to ask for early begins.
template <typename Store, int kBits, bool kStochastic, bool kResidual, int kColumns>
__attribute__((noinline)) void encode_bucket(const typename Store::Item* x, Record record,
                                             Meta meta, NoiseSeed seed, const char* ahead,
                                             uint8_t* out, typename Store::Item* residual) {
  using Item = typename Store::Item;
  store(out, meta);
  uint8_t* const planes = Record::planes(out);
  const int64_t columns = kColumns ? kColumns : record.columns();
  const bool poison = poisoned(meta);
  if (poison) memset(planes, 0, kBits * columns);
  if (poison && !kResidual) return;
  const float inverse = inverse_unit(meta);
  constexpr int64_t kTileBytes = kRows * kLanes * sizeof(Item);
  for (int64_t column = 0; column < columns; column += kLanes, ahead += kTileBytes) {
    prefetch_l1<kTileBytes>(ahead + kNearAhead);
    if (kStochastic) prefetch_l2<kTileBytes>(ahead + kFarAhead);
    const Tile tile{columns, record.values, column};
    const bool full = kColumns != 0 || tile.full();
    Edge<Item> edge;
    EdgeCodes edge_codes;
    if (!full) edge.read(x, tile, Store::item(meta.lo));  // the padding's code is 0
    const Item* const from = full ? x + column : edge.row;
    const int64_t stride = full ? columns : kLanes;
    F32 row[kRows];
    U32 code[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      row[r] = Store::load_lanes(from + r * stride);
      if constexpr (kStochastic) {
        const U32 index = lane_index() + (uint32_t)tile.first(r);
        code[r] = stochastic_code(row[r], meta.lo, inverse, noise<F32>(index, seed), kBits);
      } else {
        code[r] = nearest_code(row[r], meta.lo, inverse);
      }
    }
    if (!poison) {
      pack<kBits>(code, full ? planes + column : edge_codes.plane, stride);
      if (!full) edge_codes.write(planes, tile, kBits);
    }
    if constexpr (kResidual) {
      Item* const to = full ? residual + column : edge.row;
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        Store::store_lanes(to + r * stride, canonical_nan(row[r] - decode<F32>(code[r], meta)));
      }
      if (!full) edge.write(residual, tile);
    }
  }
}

// x / divisor. A power of two is multiplied by its inverse: the same bits, many times faster.
struct Divide {
  float by;
  bool multiply;

  CGX_HD explicit Divide(float divisor) : by(divisor), multiply(false) {
    const uint32_t bits = bit_cast<uint32_t>(divisor), exponent = bits >> 23 & 255u;
    if ((bits & 0x7fffffu) == 0 && exponent > 0 && exponent < 254) {
      multiply = true;
      by = 1.0f / divisor;
    }
  }
  CGX_HD F32 operator()(F32 x) const { return multiply ? x * by : x / by; }
};

// (x + decoded records of the peers, in order, without `skip`) / divisor.
template <typename In, typename Out, int kBits, int kColumns>
__attribute__((noinline)) void sum_bucket(const typename In::Item* x, Record record,
                                          const uint8_t* records, int64_t peer_stride,
                                          int64_t peers, int64_t skip, Divide divide,
                                          typename Out::Item* out) {
  const int64_t columns = kColumns ? kColumns : record.columns();
  for (int64_t column = 0; column < columns; column += kLanes) {
    const Tile tile{columns, record.values, column};
    const bool full = kColumns != 0 || tile.full();
    Edge<typename In::Item> edge_in;
    Edge<typename Out::Item> edge_out;
    EdgeCodes edge_codes;
    if (!full) edge_in.read(x, tile, 0);
    const typename In::Item* const from = full ? x + column : edge_in.row;
    const int64_t stride = full ? columns : kLanes;
    constexpr int64_t kTileBytes = kRows * kLanes * sizeof(*x);
    prefetch_l2<kTileBytes>((const char*)(x + kRows * column) + kFarAhead);
    F32 row[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) row[r] = In::load_lanes(from + r * stride);
    for (int64_t peer = 0; peer < peers; ++peer) {
      if (peer == skip) continue;
      const uint8_t* const peer_record = records + peer * peer_stride;
      prefetch_l1<kBits * kLanes>((const char*)peer_record + kBits * column + kNearAhead / 2);
      const Meta meta = load<Meta>(peer_record);
      const uint8_t* const planes = Record::planes(peer_record);
      if (!full) edge_codes.read(planes, tile, kBits);
      U32 code[kRows];
      unpack<kBits>(full ? planes + column : edge_codes.plane, stride, code);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) row[r] += decode<F32>(code[r], meta);
    }
    typename Out::Item* const to = full ? out + column : edge_out.row;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      Out::store_lanes(to + r * stride, canonical_nan(divide(row[r])));
    }
    if (!full) edge_out.write(out, tile);
  }
}

template <typename Store, int kBits, int kColumns>
__attribute__((noinline)) void decode_bucket(const uint8_t* from, Record record,
                                             typename Store::Item* out) {
  const int64_t columns = kColumns ? kColumns : record.columns();
  const Meta meta = load<Meta>(from);
  const uint8_t* const planes = Record::planes(from);
  for (int64_t column = 0; column < columns; column += kLanes) {
    const Tile tile{columns, record.values, column};
    const bool full = kColumns != 0 || tile.full();
    Edge<typename Store::Item> edge;
    EdgeCodes edge_codes;
    if (!full) edge_codes.read(planes, tile, kBits);
    typename Store::Item* const to = full ? out + column : edge.row;
    const int64_t stride = full ? columns : kLanes;
    U32 code[kRows];
    unpack<kBits>(full ? planes + column : edge_codes.plane, stride, code);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) Store::store_lanes(to + r * stride, decode<F32>(code[r], meta));
    if (!full) edge.write(out, tile);
  }
}

// Consecutive buckets [first, last) of one slot whose records lie in one chunk; the record of
// `first` is at `offset` of the payload.
struct Run {
  int64_t leaf;
  const Slot& slot;
  int64_t first, last;
  int64_t chunk, offset;

  CGX_HD int64_t first_value() const { return first * slot.bucket_size; }
  CGX_HD int64_t values() const {
    const int64_t end = last * slot.bucket_size;
    return (end < slot.size ? end : slot.size) - first_value();
  }
  CGX_HD int64_t bytes() const {
    return (last < slot.buckets() ? slot.record_start(last) : slot.end()) -
           slot.record_start(first);
  }
};

template <typename F>
CGX_HD void for_each_run(const Layout& layout, int64_t from, int64_t to, F f) {
  for (int64_t s = layout.slot_at(from); s < layout.num_slots && layout.slots[s].start < to; ++s) {
    const Slot& slot = layout.slots[s];
    const int64_t last = slot.first_bucket_from(to);
    for (int64_t first = slot.first_bucket_from(from); first < last;) {
      const int64_t start = slot.record_start(first), chunk = layout.chunk_of(start);
      const int64_t cut = slot.first_bucket_from(layout.begin[chunk + 1]);
      const Run run{
          s, slot, first, cut < last ? cut : last, chunk, layout.payload_offset(chunk, start)};
      f(run);
      first = run.last;
    }
  }
}

template <typename Store, bool kStochastic, bool kResidual>
struct Encode {
  using Item = typename Store::Item;
  template <int kBits>
  static void run(const EncodeCall& call, const Run& run) {
    const Slot& slot = run.slot;
    const Item* x = (const Item*)call.leaves.data[run.leaf] + run.first_value();
    Item* residual = kResidual ? (Item*)call.residuals.data[run.leaf] + run.first_value() : nullptr;
    uint8_t* out = call.payload + run.offset;
    const bool stream = call.layout.values > kStreamValues && slot.bucket_size == kUsualValues;
    const int64_t group = kGroupValues > slot.bucket_size ? kGroupValues / slot.bucket_size : 1;
    Stage<kGroupValues / kUsualValues * Record{kUsualValues, kBits}.bytes()> records;
    Stage<kUsualValues * sizeof(Item)> errors;
    for (int64_t first = run.first; first < run.last; first += group) {
      const int64_t last = first + group < run.last ? first + group : run.last;
      Meta meta[kMaxGroup];
      for (int64_t k = first; k < last; ++k) {
        meta[k - first] = find_meta<Store, !kStochastic>(x + (k - first) * slot.bucket_size,
                                                         slot.bucket_values(k), kBits);
      }
      uint8_t* const group_out = stream ? records.at(out) : out;
      int64_t bytes = 0;
      for (int64_t k = first; k < last; ++k) {
        const NoiseSeed seed =
            kStochastic ? noise_seed(call.key, slot.stream, (uint64_t)k) : NoiseSeed{};
        const Record record = slot.record(k);
        const auto encode = usual(record)
                                ? encode_bucket<Store, kBits, kStochastic, kResidual, kUsualColumns>
                                : encode_bucket<Store, kBits, kStochastic, kResidual, 0>;
        Item* const error = kResidual && stream ? errors.at(residual) : residual;
        encode(x, record, meta[k - first], seed, (const char*)x, group_out + bytes, error);
        if (kResidual && stream) errors.stream_to(residual, record.values * sizeof(Item));
        x += record.values;
        if (kResidual) residual += record.values;
        bytes += record.bytes();
      }
      if (stream) records.stream_to(out, bytes);
      out += bytes;
    }
  }
};

template <typename Store>
struct Reduce {
  using Item = typename Store::Item;
  template <int kBits>
  static void run(const ReduceCall& call, const Run& run) {
    const Slot& slot = run.slot;
    const Layout& layout = call.layout;
    const Item* x = (const Item*)call.leaves.data[run.leaf] + run.first_value();
    const Divide divide(call.divisor);
    int64_t position = run.offset - run.chunk * layout.chunk_bytes;
    for (int64_t k = run.first; k < run.last; ++k) {
      const Record record = slot.record(k);
      const auto sum = usual(record) ? sum_bucket<Store, StoreF32, kBits, kUsualColumns>
                                     : sum_bucket<Store, StoreF32, kBits, 0>;
      sum(x, record, call.payload + position, layout.chunk_bytes, layout.world, call.rank, divide,
          call.scratch);
      const Meta meta = find_meta<StoreF32, false>(call.scratch, record.values, kBits);
      const NoiseSeed seed = noise_seed(call.key, slot.stream, (uint64_t)k);
      const auto encode = usual(record)
                              ? slot.stochastic
                                    ? encode_bucket<StoreF32, kBits, true, false, kUsualColumns>
                                    : encode_bucket<StoreF32, kBits, false, false, kUsualColumns>
                          : slot.stochastic ? encode_bucket<StoreF32, kBits, true, false, 0>
                                            : encode_bucket<StoreF32, kBits, false, false, 0>;
      encode(call.scratch, record, meta, seed, (const char*)x, call.chunk + position, nullptr);
      x += record.values;
      position += record.bytes();
    }
  }
};

template <typename Store>
struct Decode {
  using Item = typename Store::Item;
  template <int kBits>
  static void run(const DecodeCall& call, const Run& run) {
    const uint8_t* from = call.payload + run.offset;
    Item* out = (Item*)call.leaves.data[run.leaf] + run.first_value();
    const bool stream = call.layout.values > kStreamValues;
    Stage<kUsualValues * sizeof(Item)> values;
    for (int64_t k = run.first; k < run.last; ++k) {
      const Record record = run.slot.record(k);
      const bool staged = stream && usual(record);
      const auto decode = usual(record) ? decode_bucket<Store, kBits, kUsualColumns>
                                        : decode_bucket<Store, kBits, 0>;
      decode(from, record, staged ? values.at(out) : out);
      if (staged) values.stream_to(out, record.values * sizeof(Item));
      from += record.bytes();
      out += record.values;
    }
  }
};

template <typename Store>
struct Accumulate {
  using Item = typename Store::Item;
  template <int kBits>
  static void run(const AccumulateCall& call, const Run& run) {
    const Item* x = (const Item*)call.leaves.data[run.leaf] + run.first_value();
    Item* out = (Item*)call.sums.data[run.leaf] + run.first_value();
    const uint8_t* records = call.payload + run.offset;
    const Divide divide(call.divisor);
    const bool stream = call.layout.values > kStreamValues;
    Stage<kUsualValues * sizeof(Item)> values;
    for (int64_t k = run.first; k < run.last; ++k) {
      const Record record = run.slot.record(k);
      const bool staged = stream && usual(record);
      const auto sum = usual(record) ? sum_bucket<Store, Store, kBits, kUsualColumns>
                                     : sum_bucket<Store, Store, kBits, 0>;
      sum(x, record, records, call.layout.total_bytes(), call.peers, call.rank, divide,
          staged ? values.at(out) : out);
      if (staged) values.stream_to(out, record.values * sizeof(Item));
      x += record.values;
      out += record.values;
      records += record.bytes();
    }
  }
};

template <typename Op, typename Call>
void run_bits(const Call& call, const Run& run) {
  switch (run.slot.bits) {
    case 1:
      return Op::template run<1>(call, run);
    case 2:
      return Op::template run<2>(call, run);
    case 3:
      return Op::template run<3>(call, run);
    case 4:
      return Op::template run<4>(call, run);
    case 5:
      return Op::template run<5>(call, run);
    case 6:
      return Op::template run<6>(call, run);
    case 7:
      return Op::template run<7>(call, run);
    default:
      return Op::template run<8>(call, run);
  }
}

template <template <typename> class Op, typename Call>
void run_dtype(DType dtype, const Call& call, const Run& run) {
  if (dtype == DType::kF32) return run_bits<Op<StoreF32>>(call, run);
  if (dtype == DType::kBF16) return run_bits<Op<StoreBF16>>(call, run);
  return run_bits<Op<StoreF16>>(call, run);
}

template <typename Store>
using EncodeNearest = Encode<Store, false, false>;
template <typename Store>
using EncodeStochastic = Encode<Store, true, false>;
template <typename Store>
using EncodeNearestResidual = Encode<Store, false, true>;
template <typename Store>
using EncodeStochasticResidual = Encode<Store, true, true>;

void encode(const EncodeCall& call, int64_t from, int64_t to) {
  for_each_run(call.layout, from, to, [&](const Run& run) {
    const DType dtype = call.leaves.dtype[run.leaf];
    const bool residual = call.residuals.data != nullptr;
    if (run.chunk == call.rank) {
      memset(call.payload + run.offset, 0, run.bytes());
      const int64_t item = item_size(dtype);
      if (residual) {
        memset((char*)call.residuals.data[run.leaf] + run.first_value() * item, 0,
               run.values() * item);
      }
    } else if (run.slot.stochastic) {
      residual ? run_dtype<EncodeStochasticResidual>(dtype, call, run)
               : run_dtype<EncodeStochastic>(dtype, call, run);
    } else {
      residual ? run_dtype<EncodeNearestResidual>(dtype, call, run)
               : run_dtype<EncodeNearest>(dtype, call, run);
    }
  });
  end_streams();
}

void reduce(const ReduceCall& call, int64_t from, int64_t to) {
  for_each_run(call.layout, from, to,
               [&](const Run& run) { run_dtype<Reduce>(call.leaves.dtype[run.leaf], call, run); });
}

void decode(const DecodeCall& call, int64_t from, int64_t to) {
  for_each_run(call.layout, from, to,
               [&](const Run& run) { run_dtype<Decode>(call.leaves.dtype[run.leaf], call, run); });
  end_streams();
}

void accumulate(const AccumulateCall& call, int64_t from, int64_t to) {
  for_each_run(call.layout, from, to, [&](const Run& run) {
    run_dtype<Accumulate>(call.leaves.dtype[run.leaf], call, run);
  });
  end_streams();
}

#define CGX_STRING(x) #x
#define CGX_NAME(x) CGX_STRING(x)

}  // namespace

extern const KernelTable kTable;
const KernelTable kTable = {CGX_NAME(CGX_ISA), encode, reduce, decode, accumulate};

}  // namespace CGX_ISA
}  // namespace cgx
