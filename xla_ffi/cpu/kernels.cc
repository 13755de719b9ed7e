// Compiled once for each instruction set, with CGX_ISA naming it. No std templates and no shared
// inline functions here: a linker must never pick one build's code for another.
#include "cpu/kernels.h"

#include <string.h>

#include "cpu/buckets.h"
#include "cpu/rotate.h"
#include "cpu/staged.h"
#include "format/runs.h"

namespace cgx {
inline namespace CGX_ISA {
namespace {

// Encodes fp32 values as they are. Others are staged.
template <bool kStochastic, bool kResidual>
struct Encode {
  using Item = float;
  static constexpr Coding kCoding = kStochastic ? Coding::kStochastic : Coding::kNearest;
  template <int kBits>
  static void run(const EncodeCall& call, const Run& run) {
    const Slot& slot = run.slot;
    const Item* x = (const Item*)call.leaves.data[run.leaf] + run.first_value();
    Item* residual = kResidual ? (Item*)call.residuals.data[run.leaf] + run.first_value() : nullptr;
    uint8_t* out = call.payload + run.offset;
    const float offset = noise_offset(slot.rounding, call.rank, call.layout.world);
    const bool nontemporal =
        call.layout.values > kNontemporalValues && slot.bucket_size == kUsualValues;
    const int64_t group = kGroupValues > slot.bucket_size ? kGroupValues / slot.bucket_size : 1;
    Stage<kGroupValues / kUsualValues * Record{kUsualValues, kBits}.bytes()> records;
    Stage<kUsualValues * sizeof(Item)> errors;
    for (int64_t first = run.first; first < run.last; first += group) {
      const int64_t last = first + group < run.last ? first + group : run.last;
      Header header[kMaxGroup];
      for (int64_t k = first; k < last; ++k) {
        const Item* const bucket = x + (k - first) * slot.bucket_size;
        const Meta meta =
            find_extremes<StoreF32, !kStochastic>(bucket, slot.bucket_values(k)).meta(kBits);
        header[k - first] = Header(meta, zero_segments(bucket, slot, k), kBits);
      }
      uint8_t* const group_out = nontemporal ? records.at(out) : out;
      int64_t bytes = 0;
      for (int64_t k = first; k < last; ++k) {
        const NoiseSeed seed =
            kStochastic ? noise_seed(call.key, slot.number, (uint64_t)k) : NoiseSeed{};
        const Record record = slot.record(k);
        const auto encode = usual(record) ? encode_bucket<kBits, kCoding, kResidual, kUsualColumns>
                                          : encode_bucket<kBits, kCoding, kResidual, 0>;
        const char* const from = (const char*)x;
        Item* const error = kResidual && nontemporal ? errors.at(residual) : residual;
        const Header own = header[k - first];
        store(group_out + bytes, own);
        encode(x, record, own.meta(), {seed, offset}, {from + kNearAhead, from + kFarAhead},
               Record::planes(group_out + bytes), error);
        if (kResidual) clear_segments(error, slot, k, own.mask());
        if (kResidual && nontemporal)
          errors.store_nontemporal(residual, record.values * sizeof(Item));
        x += record.values;
        if (kResidual) residual += record.values;
        bytes += record.bytes();
      }
      if (nontemporal) records.store_nontemporal(out, bytes);
      out += bytes;
    }
  }
};

struct Decode {
  using Item = float;
  template <int kBits>
  static void run(const DecodeCall& call, const Run& run) {
    const uint8_t* from = call.payload + run.offset;
    Item* out = (Item*)call.leaves.data[run.leaf] + run.first_value();
    const bool nontemporal = call.layout.values > kNontemporalValues;
    Stage<kUsualValues * sizeof(Item)> values;
    for (int64_t k = run.first; k < run.last; ++k) {
      const Record record = run.slot.record(k);
      const bool staged = nontemporal && usual(record);
      const auto decode =
          usual(record) ? decode_bucket<kBits, kUsualColumns> : decode_bucket<kBits, 0>;
      Item* const to = staged ? values.at(out) : out;
      decode(from, record, to);
      clear_segments(to, run.slot, k, mask_of(from));
      if (staged) values.store_nontemporal(out, record.values * sizeof(Item));
      from += record.bytes();
      out += record.values;
    }
  }
};

// The values that the payloads are added to; null if there are none.
template <typename Item>
const Item* own_values(const AccumulateCall& call, const Run& run) {
  if (call.leaves.data == nullptr) return nullptr;
  return (const Item*)call.leaves.data[run.leaf] + run.first_value();
}

template <typename Store>
struct Accumulate {
  using Item = typename Store::Item;
  template <int kBits>
  static void run(const AccumulateCall& call, const Run& run) {
    const Item* own = own_values<Item>(call, run);
    Item* out = (Item*)call.sums.data[run.leaf] + run.first_value();
    const uint8_t* records = call.payload + run.offset;
    const Divide divide(call.divisor);
    const bool nontemporal = call.layout.values > kNontemporalValues;
    Stage<kUsualValues * sizeof(Item)> values;
    for (int64_t k = run.first; k < run.last; ++k) {
      const Record record = run.slot.record(k);
      const bool staged = nontemporal && usual(record);
      Item* const to = staged ? values.at(out) : out;
      if (own == nullptr) memset(to, 0, record.values * sizeof(Item));
      const Item* const x = own == nullptr ? to : own;
      const Peers peers{records, call.layout.total_bytes(), call.peers, call.rank};
      const bool masked = masks_of(peers).any;
      if (!masked && kDirect<Store>) {
        add_peers<kBits>((const float*)x, record, peers, divide, (const char*)x, (float*)to);
      } else {
        read_values<Store>(x, record.values, Factors(nullptr, run.leaf, kIn), 0, call.scratch);
        if (masked) {
          add_masked<kBits>(call.scratch, run.slot, k, peers);
        } else {
          add_peers<kBits>(call.scratch, record, peers, Divide(1.0f), (const char*)x, call.scratch);
        }
        write_quotients<Store>(call.scratch, record.values, divide, to);
      }
      if (staged) values.store_nontemporal(out, record.values * sizeof(Item));
      if (own != nullptr) own += record.values;
      out += record.values;
      records += record.bytes();
    }
  }
};

// Adds up the peers' values while they are still rotated, rotates the sum back once, and then adds
// it to the leaf.
template <typename Store>
struct AccumulateRotated {
  using Item = typename Store::Item;
  template <int kBits>
  static void run(const AccumulateCall& call, const Run& run) {
    const Item* own = own_values<Item>(call, run);
    Item* out = (Item*)call.sums.data[run.leaf] + run.first_value();
    const uint8_t* records = call.payload + run.offset;
    for (int64_t k = run.first; k < run.last; ++k) {
      const Record record = run.slot.record(k), coded = filled(record);
      if (own == nullptr) memset(out, 0, record.values * sizeof(Item));
      const Item* const x = own == nullptr ? out : own;
      memset(call.scratch, 0, coded.values * sizeof(float));
      const Peers peers{records, call.layout.total_bytes(), call.peers, call.rank};
      const Masks masks = masks_of(peers);
      if (masks.any) {
        add_masked<kBits>(call.scratch, run.slot, k, peers);
      } else {
        add_peers<kBits>(call.scratch, coded, peers, Divide(1.0f), (const char*)x, call.scratch);
      }
      const Rotation rotation(record.columns(), run.slot.number, (uint64_t)k);
      rotate_back(call.scratch, record.columns(), rotation);
      clear_segments(call.scratch, run.slot, k, masks.all);
      add_into<Store>(x, call.scratch, record.values, Divide(call.divisor), out);
      if (own != nullptr) own += record.values;
      out += record.values;
      records += record.bytes();
    }
  }
};

template <typename Op, typename Call>
void run_bits(const Call& call, const Run& run) {
  static constexpr void (*kRun[kMaxBits])(const Call&, const Run&) = {
      Op::template run<1>, Op::template run<2>, Op::template run<3>, Op::template run<4>,
      Op::template run<5>, Op::template run<6>, Op::template run<7>, Op::template run<8>};
  kRun[run.slot.bits - 1](call, run);
}

template <template <typename> class Op, typename Call>
void run_dtype(DType dtype, const Call& call, const Run& run) {
  if (dtype == DType::kF32) return run_bits<Op<StoreF32>>(call, run);
  if (dtype == DType::kBF16) return run_bits<Op<StoreBF16>>(call, run);
  return run_bits<Op<StoreF16>>(call, run);
}

template <typename Store>
using EncodeStagedAlone = EncodeStaged<Store, false>;
template <typename Store>
using EncodeStagedResidual = EncodeStaged<Store, true>;

bool staged(const Run& run, DType dtype, const LeafUnits* units) {
  return dtype != DType::kF32 || run.slot.rotated || !Factors(units, run.leaf, kIn).none();
}

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
    } else if (staged(run, dtype, call.units)) {
      residual ? run_dtype<EncodeStagedResidual>(dtype, call, run)
               : run_dtype<EncodeStagedAlone>(dtype, call, run);
    } else if (run.slot.rounding != Rounding::kNearest) {
      residual ? run_bits<Encode<true, true>>(call, run) : run_bits<Encode<true, false>>(call, run);
    } else {
      residual ? run_bits<Encode<false, true>>(call, run)
               : run_bits<Encode<false, false>>(call, run);
    }
  });
  end_nontemporal();
}

void reduce(const ReduceCall& call, int64_t from, int64_t to) {
  for_each_run(call.layout, from, to,
               [&](const Run& run) { run_dtype<Reduce>(call.leaves.dtype[run.leaf], call, run); });
}

void decode(const DecodeCall& call, int64_t from, int64_t to) {
  for_each_run(call.layout, from, to, [&](const Run& run) {
    const DType dtype = call.leaves.dtype[run.leaf];
    staged(run, dtype, call.units) ? run_dtype<DecodeStaged>(dtype, call, run)
                                   : run_bits<Decode>(call, run);
  });
  end_nontemporal();
}

void accumulate(const AccumulateCall& call, int64_t from, int64_t to) {
  for_each_run(call.layout, from, to, [&](const Run& run) {
    const DType dtype = call.sums.dtype[run.leaf];
    run.slot.rotated ? run_dtype<AccumulateRotated>(dtype, call, run)
                     : run_dtype<Accumulate>(dtype, call, run);
  });
  end_nontemporal();
}

#define CGX_STRING(x) #x
#define CGX_NAME(x) CGX_STRING(x)

}  // namespace

extern const CodeKernels kCodes;  // codes.cc
extern const KernelTable kTable;
const KernelTable kTable = {CGX_NAME(CGX_ISA), encode, reduce, decode, accumulate, kCodes};

}  // namespace CGX_ISA
}  // namespace cgx
