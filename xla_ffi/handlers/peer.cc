#include "handlers/nccl.h"

#if CGX_HAVE_COLLECTIVES

#include <chrono>
#include <string>

#include "handlers/collectives.h"
#include "handlers/operands.h"
#include "nccl/peer.h"

namespace cgx {
namespace {

struct Call {
  std::string name;
  Leaves leaves, results, residuals;
  Units units;
  OwnedLayout owned;
  const uint32_t* keys;
  float divisor;
  Ints groups;
  PeerHow how;
};

constexpr int64_t kLongestTimeout = 1'000'000'000'000;  // ms: its nanoseconds fit into 64 bits

ffi::Error check(Call* call, Keys keys, ffi::RemainingArgs args, ffi::RemainingRets rets,
                 Ints slots, int64_t world, float divisor, Ints groups, int64_t in_host,
                 int64_t timeout_ms) {
  const std::string& name = call->name;
  CGX_TRY(check_world(name, world));
  CGX_TRY(check_groups(name, groups, world));
  const LayoutAttributes attributes{slots, world, 1, kMaxBucket};
  Leaves units;
  CGX_TRY(call->leaves.add(name, args, 1));
  CGX_TRY(split_units(name, attributes, &call->leaves, &units));
  CGX_TRY(call->results.add(name, rets, 1));
  if (call->results.size.size() > call->leaves.size.size()) {
    CGX_TRY(call->results.split(name, call->leaves.size.size(), &call->residuals));
    CGX_TRY(same_leaves(name, call->leaves, call->residuals));
  }
  CGX_TRY(same_leaves(name, call->leaves, call->results));
  CGX_TRY(build_layout(name, call->leaves.size, attributes, &call->owned));
  CGX_TRY(call->units.add(name, call->leaves, units, attributes));
  CGX_TRY(check_count(name, "keys", keys, 4));
  if (timeout_ms < 1 || timeout_ms > kLongestTimeout) {
    return invalid(name, "timeout_ms is " + std::to_string(timeout_ms) + ", must be in [1, 10^12]");
  }
  if (in_host != 0 && in_host != 1) {
    return invalid(name, "in_host is " + std::to_string(in_host) + ", must be 0 or 1");
  }
  call->keys = keys.typed_data();
  call->divisor = divisor;
  call->groups = groups;
  call->how = {std::chrono::milliseconds(timeout_ms), in_host == 1};
  return check_divisor(name, divisor);
}

// Checks a call and runs it with the device's lane, as with_lane() says.
template <typename Run, typename... Given>
ffi::Error checked(Run run, int32_t device, const Collectives& collectives, std::string_view name,
                   const Given&... given) {
  Call call = {};
  call.name = name;
  return no_throw(call.name.c_str(), [&]() -> ffi::Error {
    CGX_TRY(check(&call, given...));
    return with_lane<PeerLane>(call.name, device, collectives, call.groups, call.owned.view().world,
                               [&](PeerLane& lane, const NcclLibrary& nccl, NcclComm comm,
                                   int rank) { return run(call, lane, nccl, comm, rank); });
  });
}

template <typename Binding>
auto with_call(Binding&& binding) {
  return with_layout(std::forward<Binding>(binding)
                         .template Ctx<ffi::DeviceOrdinal>()
                         .template Ctx<ffi::Extension<Collectives>>()
                         .template Attr<std::string_view>("name")
                         .template Arg<Keys>()
                         .RemainingArgs()
                         .RemainingRets())
      .template Attr<float>("divisor")
      .template Attr<Ints>("groups")
      .template Attr<int64_t>("in_host")
      .template Attr<int64_t>("timeout_ms");
}

XLA_FFI_Error* call_initialize(XLA_FFI_CallFrame* frame) {
  static const auto handler = with_call(ffi::Ffi::BindInitialize()).To([](const auto&... given) {
    return checked(
        [](const Call& call, PeerLane& lane, const NcclLibrary& nccl, NcclComm comm, int rank) {
          return lane.prepare(call.owned.view(), call.how, nccl, comm, rank);
        },
        given...);
  });
  return handler->Call(frame);
}

XLA_FFI_Error* call_execute(XLA_FFI_CallFrame* frame) {
  static const auto handler =
      with_call(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>())
          .To([](cudaStream_t stream, const auto&... given) {
            const auto run = [&](const Call& call, PeerLane& lane, const NcclLibrary&,
                                 NcclComm comm, int rank) {
              const auto in = call.leaves.pointers(1), out = call.results.pointers(1),
                         lost = call.residuals.pointers(1);
              const DType* const dtypes = call.leaves.dtype.data();
              return lane.all_reduce({call.owned.view(),
                                      {in.data(), dtypes},
                                      {out.data(), dtypes},
                                      {lost.empty() ? nullptr : lost.data(), dtypes},
                                      call.units.first.empty() ? nullptr : call.units.first.data(),
                                      call.keys,
                                      call.divisor,
                                      call.how},
                                     comm, rank, stream);
            };
            return checked(run, given...);
          });
  return handler->Call(frame);
}

}  // namespace

Stages peer_stages() { return {call_initialize, call_execute}; }

}  // namespace cgx

#endif  // CGX_HAVE_COLLECTIVES
