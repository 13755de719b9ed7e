#include "messages/fused.h"

#include <string.h>

#include <algorithm>

namespace cgx {
namespace {

Hello hello(const FusedSpec& spec, const Layout& layout, const Segments& segments) {
  Fingerprint plan;
  plan.add(static_cast<int>(spec.collective));
  for (int64_t k = 0; k < layout.num_slots; ++k) {
    const Slot& slot = layout.slots[k];
    plan.add(slot.size);
    plan.add(slot.bits);
    plan.add(slot.bucket_size);
    plan.add(static_cast<int>(slot.rounding));
    plan.add(slot.rotated);
    plan.add(slot.segment);
    plan.add(slot.number);
    plan.add(static_cast<int>(spec.dtypes[k]));
    plan.add(!spec.units.empty() && spec.units[k].rows != nullptr);
  }
  uint32_t divisor;
  memcpy(&divisor, &spec.divisor, sizeof(divisor));
  plan.add(divisor);
  plan.add(spec.world);
  return {kHelloVersion,    plan.value(), layout.total_bytes(),
          segments.count(), spec.rank,    spec.program};
}

}  // namespace

FusedCall::FusedCall(FusedSpec spec, const CallSettings& settings, std::unique_ptr<Port> port,
                     WorkerPool& workers, BufferPool& buffers)
    : spec_(std::move(spec)),
      layout_(spec_.owned.view()),
      segments_(layout_, settings.segment_bytes),
      port_(std::move(port)),
      workers_(workers),
      sent_(buffers.take(spec_.world * layout_.chunk_bytes)),
      received_(buffers.take(
          has(spec_.collective, Phase::kScatter) ? spec_.world * layout_.chunk_bytes : 0)),
      scratch_(workers.num_threads(), spec_.owned.scratch_values()),
      transport_(*port_, spec_.collective, spec_.world, layout_, segments_, spec_.rank, spec_.tag,
                 settings.window, hello(spec_, layout_, segments_), sent_.data.get(),
                 received_.data.get()),
      schedule_(segments_.count(), settings.window, *this, transport_) {}

bool FusedCall::advance() {
  const bool moved = transport_.poll();
  if (!error().empty()) return true;
  return schedule_.step() || moved;
}

void FusedCall::release(BufferPool& buffers) {
  buffers.give_back(std::move(sent_));
  buffers.give_back(std::move(received_));
}

template <typename KernelCall>
void FusedCall::run(void (*kernel)(const KernelCall&, int64_t, int64_t), const KernelCall& call,
                    int64_t chunk, int64_t segment) {
  const int64_t from = segments_.begin(chunk, segment), to = segments_.begin(chunk, segment + 1);
  const int64_t total = std::max<int64_t>(1, layout_.total_bytes());
  const double values = static_cast<double>(layout_.values) * (to - from) / total;
  split_range(workers_, 1, from, to, pieces(static_cast<int64_t>(values)),
              [&](int64_t, int64_t first, int64_t last, int64_t worker) {
                KernelCall own = call;
                own.scratch = scratch_.of(worker);
                kernel(own, first, last);
              });
}

void FusedCall::encode_chunk(int64_t chunk, int64_t segment, int64_t rank, uint8_t* payload) {
  Layout layout = layout_;
  layout.values = 0;  // the payload is read again soon, so it must stay in the caches
  const EncodeCall call{layout,      {spec_.in.data(), spec_.dtypes.data()},
                        residuals(), spec_.keys,
                        rank,        payload,
                        nullptr,     units()};
  run(current_kernels().encode, call, chunk, segment);
}

void FusedCall::encode(int64_t segment) {
  if (!has(spec_.collective, Phase::kScatter)) return;
  for (int64_t d = 1; d < spec_.world; ++d) {
    encode_chunk((spec_.rank + d) % spec_.world, segment, spec_.rank, sent_.data.get());
  }
}

// Encodes what this rank sends to all: the sum of its chunk or, in a gather-sum, all of its values.
void FusedCall::reduce(int64_t segment) {
  uint8_t* const row = sent_.data.get() + spec_.rank * layout_.chunk_bytes;
  if (spec_.collective == Collective::kGatherSum) {
    return encode_chunk(0, segment, /*rank=*/-1, row);
  }
  const ReduceCall call{layout_,
                        {spec_.in.data(), spec_.dtypes.data()},
                        spec_.keys + 2,
                        spec_.rank,
                        received_.data.get(),
                        spec_.divisor,
                        row,
                        nullptr,
                        residuals(),
                        units()};
  run(current_kernels().reduce, call, spec_.rank, segment);
}

void FusedCall::decode(int64_t segment) {
  const LeavesOut out{spec_.out.data(), spec_.out_dtypes.data()};
  if (spec_.collective == Collective::kGatherSum) {
    const LeavesIn none{nullptr, nullptr};
    const AccumulateCall call{layout_,       none, sent_.data.get(), spec_.world, -1,
                              spec_.divisor, out,  nullptr};
    run(current_kernels().accumulate, call, 0, segment);
    return;
  }
  const DecodeCall call{layout_, sent_.data.get(), out, nullptr, units()};
  for (int64_t chunk = 0; chunk < spec_.world; ++chunk) {
    run(current_kernels().decode, call, chunk, segment);
  }
}

}  // namespace cgx
