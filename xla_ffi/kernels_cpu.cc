// Compiled once for each instruction set, with CGX_ISA naming it. No std templates and no shared
// inline functions here: a linker must never pick one build's code for another.
#include "kernels_cpu.h"

#include <string.h>

#include "buckets.h"
#include "rotate.h"
#include "runs.h"

namespace cgx {
inline namespace CGX_ISA {
namespace {

// A record of a rotated bucket: every place of its columns holds a code.
CGX_HD Record filled(Record record) { return {kRows * record.columns(), record.bits}; }

template <typename Store, bool kStochastic, bool kResidual>
struct Encode {
  using Item = typename Store::Item;
  static constexpr Coding kCoding = kStochastic ? Coding::kStochastic : Coding::kNearest;
  template <int kBits>
  static void run(const EncodeCall& call, const Run& run) {
    const Slot& slot = run.slot;
    const Item* x = (const Item*)call.leaves.data[run.leaf] + run.first_value();
    Item* residual = kResidual ? (Item*)call.residuals.data[run.leaf] + run.first_value() : nullptr;
    uint8_t* out = call.payload + run.offset;
    const float offset = noise_offset(slot.rounding, call.rank, call.layout.world);
    const bool stream = call.layout.values > kStreamValues && slot.bucket_size == kUsualValues;
    const int64_t group = kGroupValues > slot.bucket_size ? kGroupValues / slot.bucket_size : 1;
    Stage<kGroupValues / kUsualValues * Record{kUsualValues, kBits}.bytes()> records;
    Stage<kUsualValues * sizeof(Item)> errors;
    for (int64_t first = run.first; first < run.last; first += group) {
      const int64_t last = first + group < run.last ? first + group : run.last;
      Meta meta[kMaxGroup];
      for (int64_t k = first; k < last; ++k) {
        const Item* const bucket = x + (k - first) * slot.bucket_size;
        meta[k - first] =
            find_extremes<Store, !kStochastic>(bucket, slot.bucket_values(k)).meta(kBits);
      }
      uint8_t* const group_out = stream ? records.at(out) : out;
      int64_t bytes = 0;
      for (int64_t k = first; k < last; ++k) {
        const NoiseSeed seed =
            kStochastic ? noise_seed(call.key, slot.stream, (uint64_t)k) : NoiseSeed{};
        const Record record = slot.record(k);
        const auto encode = usual(record)
                                ? encode_bucket<Store, kBits, kCoding, kResidual, kUsualColumns>
                                : encode_bucket<Store, kBits, kCoding, kResidual, 0>;
        Item* const error = kResidual && stream ? errors.at(residual) : residual;
        encode(x, record, meta[k - first], {seed, offset}, (const char*)x, group_out + bytes,
               error);
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

// Encodes a bucket of fp32 values, rotated already where the slot asks for it. What is lost takes
// the values' place where kResidual says so.
template <int kBits, Coding kCoding, bool kResidual>
void encode_values(float* x, Record record, Meta meta, Noise noise, const char* ahead,
                   uint8_t* out) {
  const auto encode = usual(record)
                          ? encode_bucket<StoreF32, kBits, kCoding, kResidual, kUsualColumns>
                          : encode_bucket<StoreF32, kBits, kCoding, kResidual, 0>;
  encode(x, record, meta, noise, ahead, out, kResidual ? x : nullptr);
}

template <int kBits, bool kResidual>
void encode_values(float* x, const Slot& slot, Record record, Noise noise, const char* ahead,
                   uint8_t* out) {
  const Extremes found = find_extremes<StoreF32, false>(x, record.values);
  if (slot.rounding != Rounding::kNearest) {
    const Meta meta = found.meta(kBits);
    encode_values<kBits, Coding::kStochastic, kResidual>(x, record, meta, noise, ahead, out);
  } else if (!slot.rotated || !Rotation::whole(record.columns())) {
    const Meta meta = found.meta(kBits);
    encode_values<kBits, Coding::kNearest, kResidual>(x, record, meta, noise, ahead, out);
  } else {
    const float squares =
        sum_squares(x, static_cast<int>(record.columns()), Scaling(found.min, found.max).down);
    const Meta meta =
        make_clipped_meta(found.min, found.max, found.finite, squares, record.values, kBits);
    encode_values<kBits, Coding::kClipped, kResidual>(x, record, meta, noise, ahead, out);
  }
}

template <typename Store, bool kResidual>
struct EncodeRotated {
  using Item = typename Store::Item;
  template <int kBits>
  static void run(const EncodeCall& call, const Run& run) {
    const Slot& slot = run.slot;
    const Item* x = (const Item*)call.leaves.data[run.leaf] + run.first_value();
    Item* residual = kResidual ? (Item*)call.residuals.data[run.leaf] + run.first_value() : nullptr;
    uint8_t* out = call.payload + run.offset;
    const float offset = noise_offset(slot.rounding, call.rank, call.layout.world);
    for (int64_t k = run.first; k < run.last; ++k) {
      const Record record = slot.record(k);
      const Rotation rotation(record.columns(), slot.stream, (uint64_t)k);
      read_rotated<Store>(x, record, rotation, call.scratch);
      const Noise noise{noise_seed(call.key, slot.stream, (uint64_t)k), offset};
      encode_values<kBits, kResidual>(call.scratch, slot, filled(record), noise, (const char*)x,
                                      out);
      if (kResidual) {
        write_rotated_back<Store>(call.scratch, record, rotation, 1.0f, residual);
        residual += record.values;
      }
      x += record.values;
      out += record.bytes();
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
    const bool residual = call.residuals.data != nullptr;
    Item* lost = residual ? (Item*)call.residuals.data[run.leaf] + run.first_value() : nullptr;
    int64_t position = run.offset - run.chunk * layout.chunk_bytes;
    for (int64_t k = run.first; k < run.last; ++k) {
      const Record record = slot.record(k), coded = slot.rotated ? filled(record) : record;
      const Rotation rotation(record.columns(), slot.stream, (uint64_t)k);
      if (slot.rotated) read_rotated<Store>(x, record, rotation, call.scratch);
      const auto add = [&](auto from, const auto* own) {
        using From = decltype(from);
        const auto sum = usual(coded) ? sum_bucket<From, StoreF32, kBits, kUsualColumns>
                                      : sum_bucket<From, StoreF32, kBits, 0>;
        sum(own, coded, call.payload + position, layout.chunk_bytes, layout.world, call.rank,
            divide, call.scratch);
      };
      slot.rotated ? add(StoreF32{}, call.scratch) : add(Store{}, x);
      const Noise noise{noise_seed(call.key, slot.stream, (uint64_t)k), 0.0f};
      const auto encode = residual ? encode_values<kBits, true> : encode_values<kBits, false>;
      encode(call.scratch, slot, coded, noise, (const char*)x, call.chunk + position);
      x += record.values;
      if (residual) {
        if (slot.rotated) {
          write_rotated_back<Store>(call.scratch, record, rotation, call.divisor, lost);
        } else {
          scale_into<Store>(call.scratch, record.values, call.divisor, lost);
        }
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
struct DecodeRotated {
  using Item = typename Store::Item;
  template <int kBits>
  static void run(const DecodeCall& call, const Run& run) {
    const uint8_t* from = call.payload + run.offset;
    Item* out = (Item*)call.leaves.data[run.leaf] + run.first_value();
    for (int64_t k = run.first; k < run.last; ++k) {
      const Record record = run.slot.record(k);
      const auto decode = usual(filled(record)) ? decode_bucket<StoreF32, kBits, kUsualColumns>
                                                : decode_bucket<StoreF32, kBits, 0>;
      decode(from, filled(record), call.scratch);
      const Rotation rotation(record.columns(), run.slot.stream, (uint64_t)k);
      write_rotated_back<Store>(call.scratch, record, rotation, 1.0f, out);
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

// What the peers sent is added up as it came, turned back once, and then added to the leaf.
template <typename Store>
struct AccumulateRotated {
  using Item = typename Store::Item;
  template <int kBits>
  static void run(const AccumulateCall& call, const Run& run) {
    const Item* x = (const Item*)call.leaves.data[run.leaf] + run.first_value();
    Item* out = (Item*)call.sums.data[run.leaf] + run.first_value();
    const uint8_t* records = call.payload + run.offset;
    for (int64_t k = run.first; k < run.last; ++k) {
      const Record record = run.slot.record(k), coded = filled(record);
      memset(call.scratch, 0, coded.values * sizeof(float));
      const auto sum = usual(coded) ? sum_bucket<StoreF32, StoreF32, kBits, kUsualColumns>
                                    : sum_bucket<StoreF32, StoreF32, kBits, 0>;
      sum(call.scratch, coded, records, call.layout.total_bytes(), call.peers, call.rank,
          Divide(1.0f), call.scratch);
      const Rotation rotation(record.columns(), run.slot.stream, (uint64_t)k);
      rotate_back(call.scratch, record.columns(), rotation);
      add_into<Store>(x, call.scratch, record.values, Divide(call.divisor), out);
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
template <typename Store>
using EncodeRotatedAlone = EncodeRotated<Store, false>;
template <typename Store>
using EncodeRotatedResidual = EncodeRotated<Store, true>;

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
    } else if (run.slot.rotated) {
      residual ? run_dtype<EncodeRotatedResidual>(dtype, call, run)
               : run_dtype<EncodeRotatedAlone>(dtype, call, run);
    } else if (run.slot.rounding != Rounding::kNearest) {
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
  for_each_run(call.layout, from, to, [&](const Run& run) {
    const DType dtype = call.leaves.dtype[run.leaf];
    run.slot.rotated ? run_dtype<DecodeRotated>(dtype, call, run)
                     : run_dtype<Decode>(dtype, call, run);
  });
  end_streams();
}

void accumulate(const AccumulateCall& call, int64_t from, int64_t to) {
  for_each_run(call.layout, from, to, [&](const Run& run) {
    const DType dtype = call.leaves.dtype[run.leaf];
    run.slot.rotated ? run_dtype<AccumulateRotated>(dtype, call, run)
                     : run_dtype<Accumulate>(dtype, call, run);
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
