#include "mpi/fused.h"

#include <string.h>

#include <algorithm>

#include "cpu/parallel.h"

namespace cgx {
namespace {

Hello hello(const FusedSpec& spec, const Layout& layout, const Segments& segments) {
  Fingerprint plan;
  for (int64_t k = 0; k < layout.num_slots; ++k) {
    const Slot& slot = layout.slots[k];
    plan.add(slot.size);
    plan.add(slot.bits);
    plan.add(slot.bucket_size);
    plan.add(static_cast<int>(slot.rounding));
    plan.add(slot.rotated);
    plan.add(slot.number);
    plan.add(static_cast<int>(spec.dtypes[k]));
    plan.add(!spec.units.empty() && spec.units[k].num_rows > 0);
  }
  uint32_t divisor;
  memcpy(&divisor, &spec.divisor, sizeof(divisor));
  plan.add(divisor);
  plan.add(layout.world);
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
      sent_(buffers.take(layout_.world * layout_.chunk_bytes)),
      received_(buffers.take(layout_.world * layout_.chunk_bytes)),
      scratch_(workers.num_threads(), spec_.owned.longest_bucket()),
      transport_(*port_, layout_, segments_, spec_.rank, spec_.tag, settings.window,
                 hello(spec_, layout_, segments_), sent_.data.get(), received_.data.get()),
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

template <typename F>
void FusedCall::split(int64_t from, int64_t to, F&& f) {
  const int64_t total = std::max<int64_t>(1, layout_.total_bytes());
  const double values = static_cast<double>(layout_.values) * (to - from) / total;
  split_range(
      workers_, 1, from, to, pieces(static_cast<int64_t>(values)),
      [&](int64_t, int64_t first, int64_t last, int64_t worker) { f(first, last, worker); });
}

void FusedCall::encode(int64_t segment) {
  Layout layout = layout_;
  layout.values = 0;  // the payload is read again at once: it shall stay in the caches
  const EncodeCall call{layout,      {spec_.in.data(), spec_.dtypes.data()},
                        residuals(), spec_.keys,
                        spec_.rank,  sent_.data.get(),
                        nullptr,     units()};
  for (int64_t d = 1; d < layout_.world; ++d) {
    const int64_t chunk = (spec_.rank + d) % layout_.world;
    split(segments_.begin(chunk, segment), segments_.begin(chunk, segment + 1),
          [&](int64_t from, int64_t to, int64_t worker) {
            EncodeCall own = call;
            own.scratch = scratch_.of(worker);
            current_kernels().encode(own, from, to);
          });
  }
}

void FusedCall::reduce(int64_t segment) {
  const ReduceCall call{layout_,
                        {spec_.in.data(), spec_.dtypes.data()},
                        spec_.keys + 2,
                        spec_.rank,
                        received_.data.get(),
                        spec_.divisor,
                        sent_.data.get() + spec_.rank * layout_.chunk_bytes,
                        nullptr,
                        residuals(),
                        units()};
  split(segments_.begin(spec_.rank, segment), segments_.begin(spec_.rank, segment + 1),
        [&](int64_t from, int64_t to, int64_t worker) {
          ReduceCall own = call;
          own.scratch = scratch_.of(worker);
          current_kernels().reduce(own, from, to);
        });
}

void FusedCall::decode(int64_t segment) {
  const DecodeCall call{
      layout_, sent_.data.get(), {spec_.out.data(), spec_.dtypes.data()}, nullptr, units()};
  for (int64_t chunk = 0; chunk < layout_.world; ++chunk) {
    split(segments_.begin(chunk, segment), segments_.begin(chunk, segment + 1),
          [&](int64_t from, int64_t to, int64_t worker) {
            DecodeCall own = call;
            own.scratch = scratch_.of(worker);
            current_kernels().decode(own, from, to);
          });
  }
}

}  // namespace cgx
