// Compiled once for each instruction set, with CGX_ISA naming it. No std templates and no shared
// inline functions here: a linker must never pick one build's code for another.
#include "kernels_cpu.h"

#include <string.h>

#include "buckets.h"
#include "runs.h"

namespace cgx {
inline namespace CGX_ISA {
namespace {

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

template <int kBits, bool kResidual>
auto encode_of(bool stochastic, bool usual) {
  if (stochastic) {
    return usual ? encode_bucket<StoreF32, kBits, true, kResidual, kUsualColumns>
                 : encode_bucket<StoreF32, kBits, true, kResidual, 0>;
  }
  return usual ? encode_bucket<StoreF32, kBits, false, kResidual, kUsualColumns>
               : encode_bucket<StoreF32, kBits, false, kResidual, 0>;
}

template <typename Store>
struct Reduce {
  using Item = typename Store::Item;
  template <int kBits>
  static void run(const ReduceCall& call, const Run& run) {
    const Slot& slot = run.slot;
    const Layout& layout = call.layout;
    const Item* x = (const Item*)call.leaves.data[run.leaf] + run.first_value();
    const Divide divide(call.divisor);
    const bool residual = call.residuals.data != nullptr;
    Item* lost = residual ? (Item*)call.residuals.data[run.leaf] + run.first_value() : nullptr;
    int64_t position = run.offset - run.chunk * layout.chunk_bytes;
    for (int64_t k = run.first; k < run.last; ++k) {
      const Record record = slot.record(k);
      const auto sum = usual(record) ? sum_bucket<Store, StoreF32, kBits, kUsualColumns>
                                     : sum_bucket<Store, StoreF32, kBits, 0>;
      sum(x, record, call.payload + position, layout.chunk_bytes, layout.world, call.rank, divide,
          call.scratch);
      const Meta meta = find_meta<StoreF32, false>(call.scratch, record.values, kBits);
      const NoiseSeed seed = noise_seed(call.key, slot.stream, (uint64_t)k);
      const auto encode = residual ? encode_of<kBits, true>(slot.stochastic, usual(record))
                                   : encode_of<kBits, false>(slot.stochastic, usual(record));
      // The residual takes the sum's place in the scratch, tile by tile.
      encode(call.scratch, record, meta, seed, (const char*)x, call.chunk + position, call.scratch);
      x += record.values;
      if (residual) {
        scale_into<Store>(call.scratch, record.values, call.divisor, lost);
        lost += record.values;
      }
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
