#include "handlers/nccl.h"

#if CGX_HAVE_COLLECTIVES

#include <string>
#include <vector>

#include "handlers/collectives.h"
#include "handlers/operands.h"
#include "nccl/fused.h"
#include "nccl/library.h"

namespace cgx {
namespace {

// Takes a dictionary, because a handler that lists its attributes would have to name all of the
// attributes that the call has.
ffi::Error prepare(Collectives collectives, ffi::Dictionary attributes) {
  const auto positions = attributes.get<Ints>("groups");
  const auto world = attributes.get<int64_t>("world");
  const auto name = attributes.get<std::string_view>("name");
  if (positions.has_error()) return positions.error();
  if (world.has_error()) return world.error();
  if (name.has_error()) return name.error();
  CGX_TRY(check_world(std::string(*name), *world));
  CGX_TRY(check_groups(std::string(*name), *positions, *world));
  const auto groups = groups_of(*positions, *world);
  auto args = arguments<XLA_FFI_Communicator_Request_Args>(groups);
  args.struct_size = XLA_FFI_Communicator_Request_Args_STRUCT_SIZE;
  return taken(collectives,
               collectives.extension->request_communicator(collectives.extension, &args));
}

// Repeats the entries `once` for each of `rows` rows.
template <typename T>
std::vector<T> repeated(const std::vector<T>& once, int64_t rows) {
  std::vector<T> all;
  all.reserve(once.size() * rows);
  for (int64_t r = 0; r < rows; ++r) all.insert(all.end(), once.begin(), once.end());
  return all;
}

// A call with its operands and attributes checked.
struct Call {
  std::string name;
  int64_t world, rows, rows_in, rows_out;
  Leaves leaves, results, residuals;
  Units units;
  OwnedLayout owned;
  const uint32_t* keys;
  float divisor;
  Ints groups;
  int64_t segment_bytes, streams;
  uint8_t* payloads;
};

template <Collective kCollective>
ffi::Error check(Call* call, Keys keys, ffi::RemainingArgs args, ffi::RemainingRets rets,
                 Ints slots, int64_t world, float divisor, Ints groups, int64_t segment_bytes,
                 int64_t streams) {
  const std::string& name = call->name;
  CGX_TRY(check_world(name, world));
  CGX_TRY(check_groups(name, groups, world));
  constexpr bool kReduces = kCollective == Collective::kAllReduce;
  constexpr bool kScatters = kCollective == Collective::kReduceScatter;
  constexpr bool kGathers = kCollective == Collective::kAllGather;
  call->world = world;
  call->rows = kReduces ? 1 : world;
  call->rows_in = kScatters ? world : 1, call->rows_out = kGathers ? world : 1;
  Leaves &leaves = call->leaves, &results = call->results;
  const LayoutAttributes attributes{slots, world, call->rows,
                                    kScatters || kGathers ? 0 : kTileValues};
  Leaves units;
  CGX_TRY(leaves.add(name, args, call->rows_in));
  CGX_TRY(split_units(name, attributes, &leaves, &units));
  CGX_TRY(results.add(name, rets, call->rows_out, /*others=*/1));
  if (!kScatters && !kGathers && results.size.size() > leaves.size.size()) {
    CGX_TRY(results.split(name, leaves.size.size(), &call->residuals));
    CGX_TRY(same_leaves(name, leaves, call->residuals));
  }
  CGX_TRY(build_layout(name, leaves.size, attributes, &call->owned));
  CGX_TRY(same_leaves(name, sums_of<kCollective>(leaves, attributes), results));
  CGX_TRY(call->units.add(name, leaves, units, attributes));
  CGX_TRY(check_count(name, "keys", keys, kScatters ? 2 * world : kReduces ? 4 : 2));
  CGX_TRY(check_divisor(name, divisor));
  if (segment_bytes < 1) return invalid(name, expected("segment_bytes", segment_bytes, 1));
  if (streams < 1 || streams > kMostStreams) {
    return invalid(name, "streams is " + std::to_string(streams) + ", must be in [1, " +
                             std::to_string(kMostStreams) + "]");
  }
  const auto payloads = rets.get<Payload>(rets.size() - 1);
  if (payloads.has_error()) return invalid(name, "payloads: " + payloads.error().message());
  CGX_TRY(check_count(name, "payloads", **payloads,
                      CudaFused::scratch_bytes(kCollective, call->owned.view(), segment_bytes)));
  call->keys = keys.typed_data();
  call->divisor = divisor;
  call->groups = groups;
  call->segment_bytes = segment_bytes;
  call->streams = streams;
  call->payloads = (*payloads)->typed_data();
  return ffi::Error::Success();
}

ffi::Error initialize(int32_t device, const Collectives& collectives, const Call& call) {
  return with_lane<CudaLane>(call.name, device, collectives, call.groups, call.world,
                             [&](CudaLane& lane, const NcclLibrary& nccl, NcclComm comm, int rank) {
                               std::string error = lane.prepare(
                                   CudaFused::segments(call.owned.view(), call.segment_bytes));
                               if (error.empty())
                                 error = lane.connect(call.streams, nccl, comm, rank, call.world);
                               return error;
                             });
}

template <Collective kCollective>
ffi::Error execute(cudaStream_t stream, int32_t device, const Collectives& collectives,
                   const Call& call) {
  const auto in = repeated(call.leaves.pointers(call.rows_in), call.rows / call.rows_in);
  const auto out = repeated(call.results.pointers(call.rows_out), call.rows / call.rows_out);
  const auto lost = repeated(call.residuals.pointers(1), call.rows);
  const auto dtypes = repeated(call.leaves.dtype, call.rows);
  const auto sums = repeated(call.results.dtype, call.rows);
  const auto units = repeated(call.units.first, call.rows);
  return with_lane<CudaLane>(call.name, device, collectives, call.groups, call.world,
                             [&](CudaLane& lane, const NcclLibrary& nccl, NcclComm comm, int rank) {
                               return CudaFused(
                                          {kCollective,
                                           call.owned.view(),
                                           {in.data(), dtypes.data()},
                                           {out.data(), sums.data()},
                                           {lost.empty() ? nullptr : lost.data(), dtypes.data()},
                                           call.keys,
                                           call.divisor,
                                           rank,
                                           call.segment_bytes,
                                           call.streams,
                                           call.payloads,
                                           units.empty() ? nullptr : units.data()},
                                          nccl, comm, lane, stream)
                                   .run();
                             });
}

// Checks a call and hands it to `f`.
template <Collective kCollective, typename F, typename... Given>
ffi::Error checked(F f, std::string_view name, const Given&... given) {
  Call call = {};
  call.name = name;
  return no_throw(call.name.c_str(), [&]() -> ffi::Error {
    CGX_TRY(check<kCollective>(&call, given...));
    return f(call);
  });
}

// Binds the arguments of checked().
template <typename Binding>
auto with_call(Binding&& binding) {
  return with_layout(std::forward<Binding>(binding)
                         .template Attr<std::string_view>("name")
                         .template Arg<Keys>()
                         .RemainingArgs()
                         .RemainingRets())
      .template Attr<float>("divisor")
      .template Attr<Ints>("groups")
      .template Attr<int64_t>("segment_bytes")
      .template Attr<int64_t>("streams");
}

template <Collective kCollective>
XLA_FFI_Error* call_initialize(XLA_FFI_CallFrame* frame) {
  static const auto handler =
      with_call(
          ffi::Ffi::BindInitialize().Ctx<ffi::DeviceOrdinal>().Ctx<ffi::Extension<Collectives>>())
          .To([](int32_t device, const Collectives& collectives, const auto&... given) {
            return checked<kCollective>(
                [&](const Call& call) { return initialize(device, collectives, call); }, given...);
          });
  return handler->Call(frame);
}

template <Collective kCollective>
XLA_FFI_Error* call_execute(XLA_FFI_CallFrame* frame) {
  static const auto handler =
      with_call(ffi::Ffi::Bind()
                    .Ctx<ffi::PlatformStream<cudaStream_t>>()
                    .Ctx<ffi::DeviceOrdinal>()
                    .Ctx<ffi::Extension<Collectives>>())
          .To([](cudaStream_t stream, int32_t device, const Collectives& collectives,
                 const auto&... given) {
            return checked<kCollective>(
                [&](const Call& call) {
                  return execute<kCollective>(stream, device, collectives, call);
                },
                given...);
          });
  return handler->Call(frame);
}

template <Collective kCollective>
constexpr Stages stages() {
  return {call_initialize<kCollective>, call_execute<kCollective>};
}

}  // namespace

XLA_FFI_Error* nccl_prepare(XLA_FFI_CallFrame* frame) {
  static const auto handler =
      ffi::Ffi::BindPrepare().Ctx<ffi::Extension<Collectives>>().Attrs().To(prepare);
  return handler->Call(frame);
}

Stages nccl_stages(Collective collective) {
  switch (collective) {
    case Collective::kAllReduce:
      return stages<Collective::kAllReduce>();
    case Collective::kReduceScatter:
      return stages<Collective::kReduceScatter>();
    case Collective::kAllGather:
      return stages<Collective::kAllGather>();
    default:
      return stages<Collective::kGatherSum>();
  }
}

}  // namespace cgx

#endif  // CGX_HAVE_COLLECTIVES
