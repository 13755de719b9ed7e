// The XLA calls that encode, reduce, decode and accumulate, for any platform. This file declares
// and checks what each call takes and returns.
#ifndef CGX_HANDLERS_CODEC_CALLS_H_
#define CGX_HANDLERS_CODEC_CALLS_H_

#include <vector>

#include "handlers/bind.h"
#include "handlers/operands.h"

namespace cgx {

// The operands of one call. Keys and ranks are not checked, as they may be in device memory.
struct Operands {
  Operands(const char* name, const LayoutAttributes& attributes)
      : call(name), attributes(attributes) {}

  const char* const call;
  const LayoutAttributes attributes;
  int64_t batch = 0;
  const uint32_t* keys = nullptr;  // two words for each batch element
  const int32_t* ranks = nullptr;
  float divisor = 1;
  Leaves leaves, results, units;
  OwnedLayout owned;

  Layout layout() const { return owned.view(); }
  // What the kernels take for a batch element. Data is null if there is none.
  LeavesIn in(int64_t b) const { return {at(from_, leaves, b), leaves.dtype.data()}; }
  LeavesOut out(int64_t b) const { return {at(to_, results, b), results.dtype.data()}; }
  const LeafUnits* leaf_units(int64_t b) const {
    return units_.empty() ? nullptr : units_.data() + b * (units_.size() / batch);
  }

  ffi::Error add(const Ranks& rank, const ffi::RemainingArgs& args,
                 const ffi::RemainingRets& rets) {
    batch = rank.element_count();
    ranks = rank.typed_data();
    CGX_TRY(check_batch(call, batch));
    CGX_TRY(leaves.add(call, args, batch));
    return results.add(call, rets, batch);
  }
  // Builds the layout of leaves like these.
  ffi::Error build(const Leaves& like) {
    Units first;
    CGX_TRY(build_layout(call, like.size, attributes, &owned));
    CGX_TRY(first.add(call, like, units, attributes));
    units_ = first.all(batch);
    from_ = leaves.pointers(batch), to_ = results.pointers(batch);
    return ffi::Error::Success();
  }
  ffi::Error add_keys(const Keys& key) {
    keys = key.typed_data();
    return check_count(call, "key", key, batch * 2);
  }
  ffi::Error check_rows(const char* what, const Payload& payload, int64_t rows) const {
    return check_count(call, what, payload, batch * rows * layout().chunk_bytes);
  }

 private:
  static void* const* at(const std::vector<void*>& all, const Leaves& leaves, int64_t b) {
    return all.empty() ? nullptr : all.data() + b * leaves.data.size();
  }
  std::vector<void*> from_, to_;
  std::vector<LeafUnits> units_;
};

// `Device` does the work. Device::Given is what the call receives of its context. Device has a
// function for each call.
// Device::kLongestInUnits is the longest bucket whose values it multiplies by units.
template <typename Device>
class CodecCalls {
  using Given = typename Device::Given;

 public:
  // (key, rank, leaves, units) -> payload [, residuals]
  static XLA_FFI_Error* encode(XLA_FFI_CallFrame* frame) {
    return call<run_encode>(frame, "cgx_encode");
  }
  // (key, rank, payload, leaves [, residuals], units) -> chunk [, residuals, in the memory of their
  // operands]
  static XLA_FFI_Error* reduce(XLA_FFI_CallFrame* frame) {
    return call<run_reduce>(frame, "cgx_reduce", "divisor");
  }
  // (payload, units) -> leaves
  static XLA_FFI_Error* decode(XLA_FFI_CallFrame* frame) {
    return call<run_decode>(frame, "cgx_decode");
  }
  // (rank, payload of all peers, leaves) -> leaves
  static XLA_FFI_Error* accumulate(XLA_FFI_CallFrame* frame) {
    return call<run_accumulate>(frame, "cgx_accumulate", "divisor");
  }

 private:
  template <auto kFunction, typename... Names>
  static XLA_FFI_Error* call(XLA_FFI_CallFrame* frame, const char* name, Names... attributes) {
    return named_call<kFunction, Device::kTraits>(frame, name, "slots", "world", attributes...);
  }

  static ffi::Error run_encode(const char* name, Given device, Keys key, Ranks rank,
                               ffi::RemainingArgs args, ffi::Result<Payload> payload,
                               ffi::RemainingRets rets, Ints slots, int64_t world) {
    Operands all(name, {slots, world, 1, Device::kLongestInUnits});
    CGX_TRY(all.add(rank, args, rets));
    CGX_TRY(split_units(name, all.attributes, &all.leaves, &all.units));
    if (rets.size() > 0) CGX_TRY(same_leaves(name, all.leaves, all.results));
    CGX_TRY(all.build(all.leaves));
    CGX_TRY(all.add_keys(key));
    CGX_TRY(all.check_rows("payload", *payload, world));
    return Device::encode(device, all, payload->typed_data());
  }

  static ffi::Error run_reduce(const char* name, Given device, Keys key, Ranks rank,
                               Payload payload, ffi::RemainingArgs args, ffi::Result<Payload> chunk,
                               ffi::RemainingRets rets, Ints slots, int64_t world, float divisor) {
    Operands all(name, {slots, world, 1, Device::kLongestInUnits});
    CGX_TRY(all.add(rank, args, rets));
    CGX_TRY(split_units(name, all.attributes, &all.leaves, &all.units));
    if (rets.size() > 0) {
      Leaves residuals;
      CGX_TRY(all.leaves.split(name, rets.size(), &residuals));
      CGX_TRY(same_leaves(name, all.leaves, residuals));
      CGX_TRY(same_leaves(name, all.leaves, all.results));
      if (residuals.data != all.results.data) {
        return invalid(name, "residual results must lie where their operands lie");
      }
    }
    CGX_TRY(all.build(all.leaves));
    CGX_TRY(all.add_keys(key));
    CGX_TRY(all.check_rows("payload", payload, world));
    CGX_TRY(all.check_rows("chunk", *chunk, 1));
    CGX_TRY(check_divisor(name, divisor));
    all.divisor = divisor;
    return Device::reduce(device, all, payload.typed_data(), chunk->typed_data());
  }

  static ffi::Error run_decode(const char* name, Given device, Payload payload,
                               ffi::RemainingArgs args, ffi::RemainingRets rets, Ints slots,
                               int64_t world) {
    Operands all(name, {slots, world, 1, Device::kLongestInUnits});
    const auto dims = payload.dimensions();
    // An empty payload may claim any batch, even one with too many elements to loop over.
    all.batch = dims.size() == 3 && payload.element_count() > 0 ? dims[0] : 1;
    CGX_TRY(all.results.add(name, rets, all.batch));
    CGX_TRY(all.units.add(name, args, all.batch));
    CGX_TRY(check_number(name, "units", args.size(), all.attributes.have_units()));
    CGX_TRY(all.build(all.results));
    CGX_TRY(all.check_rows("payload", payload, world));
    return Device::decode(device, all, payload.typed_data());
  }

  static ffi::Error run_accumulate(const char* name, Given device, Ranks rank, Payload payload,
                                   ffi::RemainingArgs args, ffi::RemainingRets rets, Ints slots,
                                   int64_t world, float divisor) {
    Operands all(name, {slots, world});
    CGX_TRY(all.add(rank, args, rets));
    const auto dims = payload.dimensions();
    if (dims.size() < 2) return invalid(name, expected("rank of payload", dims.size(), 2));
    const int64_t peers = dims[dims.size() - 2];
    CGX_TRY(check_world(name, peers, "number of rows of payload"));
    CGX_TRY(same_leaves(name, all.leaves, all.results));
    if (world != 1) return invalid(name, expected("world", world, 1));
    CGX_TRY(all.build(all.leaves));
    CGX_TRY(all.check_rows("payload", payload, peers));
    CGX_TRY(check_divisor(name, divisor));
    all.divisor = divisor;
    return Device::accumulate(device, all, payload.typed_data(), peers);
  }
};

}  // namespace cgx

#endif  // CGX_HANDLERS_CODEC_CALLS_H_
