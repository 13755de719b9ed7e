#include "handlers_nccl.h"

#if CGX_HAVE_COLLECTIVES

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "fused_cuda.h"
#include "nccl_library.h"
#include "operands.h"
#include "xla/ffi/api/collectives_c_api.h"

namespace cgx {
namespace {

// XLA's communicators. The extension grows at its end, and only what version 0.1 has is used, so
// every later 0.x will do; the wrapper in XLA's headers insists on the version built against.
struct Collectives {
  using Type = Collectives;
  using CExtension = XLA_FFI_Collectives_Extension;
  static constexpr const char* kName = "Collectives";
  static constexpr int32_t kExtensionType = XLA_FFI_Extension_Collectives;
  static constexpr int32_t kMajorVersion = 0, kMinorVersion = 1;
  static bool Support(int32_t major, int32_t minor) { return major == 0 && minor >= 1; }
  static Collectives Create(const XLA_FFI_Api* api, const CExtension* extension) {
    return {api, extension};
  }

  const XLA_FFI_Api* api;
  const CExtension* extension;
};

// The number of XLA's own collectives: a call shares their communicator.
constexpr int64_t kCommunication = 0;

ffi::Error check_world(const std::string& call, int64_t world) {
  if (world >= 1 && world <= kMaxWorld) return ffi::Error::Success();
  return invalid(call, "world is " + std::to_string(world) + ", must be in [1, 2^20]");
}

// Positions in the mesh, group by group, as the runtime takes them.
std::vector<XLA_FFI_ReplicaGroup> groups_of(Ints positions, int64_t world) {
  std::vector<XLA_FFI_ReplicaGroup> groups;
  for (size_t i = 0; i < positions.size(); i += world) {
    groups.push_back({positions.begin() + i, static_cast<size_t>(world)});
  }
  return groups;
}

// What asking for a communicator and taking it have in common.
template <typename Args>
Args arguments(const std::vector<XLA_FFI_ReplicaGroup>& groups) {
  Args args = {};
  args.group_mode = XLA_FFI_GROUP_FLATTENED_ID;
  args.groups = groups.data();
  args.num_groups = groups.size();
  args.communication_id = kCommunication;
  return args;
}

ffi::Error taken(const Collectives& collectives, XLA_FFI_Error* error) {
  return error ? ffi::internal::ErrorPolicy::TakeError(collectives.api, error)
               : ffi::Error::Success();
}

// A dictionary, since the frame has all attributes of the call and a list must name every one.
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

ffi::Error communicator(const Collectives& collectives, Ints positions, int64_t world,
                        NcclComm* comm) {
  const auto groups = groups_of(positions, world);
  auto args = arguments<XLA_FFI_Communicator_Get_Args>(groups);
  args.struct_size = XLA_FFI_Communicator_Get_Args_STRUCT_SIZE;
  CGX_TRY(
      taken(collectives, collectives.extension->get_communicator(collectives.extension, &args)));
  *comm = reinterpret_cast<NcclComm>(args.communicator);
  return ffi::Error::Success();
}

// The lane of the current device. Devices of one process may wait for each other inside of NCCL, so
// each is locked by itself.
struct LockedLane {
  std::mutex mutex;
  CudaLane lane;
};

LockedLane& lane_of(int device) {
  static std::mutex mutex;
  static auto* const lanes = new std::map<int, LockedLane>;  // streams outlive static destructors
  const std::lock_guard<std::mutex> lock(mutex);
  return (*lanes)[device];
}

// What lies in memory once, for each of `rows` rows.
template <typename T>
std::vector<T> repeated(const std::vector<T>& once, int64_t rows) {
  std::vector<T> all;
  all.reserve(once.size() * rows);
  for (int64_t r = 0; r < rows; ++r) all.insert(all.end(), once.begin(), once.end());
  return all;
}

template <Collective kCollective>
ffi::Error execute(cudaStream_t stream, Collectives collectives, Keys keys, ffi::RemainingArgs args,
                   ffi::RemainingRets rets, Ints bits, Ints bucket_size, Ints rounding,
                   Ints rotation, Ints stream_numbers, int64_t world, float divisor, Ints positions,
                   int64_t segment_bytes, std::string_view name) {
  const std::string call(name);
  const auto internal = [&](const std::string& text) {
    return ffi::Error::Internal(call + ": " + text);
  };
  return no_throw(call.c_str(), [&]() -> ffi::Error {
    CGX_TRY(check_world(call, world));
    CGX_TRY(check_groups(call, positions, world));
    constexpr bool kScatters = kCollective == Collective::kReduceScatter;
    constexpr bool kGathers = kCollective == Collective::kAllGather;
    const int64_t rows = kScatters || kGathers ? world : 1;
    const int64_t rows_in = kScatters ? world : 1, rows_out = kGathers ? world : 1;
    Leaves leaves, results, residuals;
    OwnedLayout owned;
    CGX_TRY(leaves.add(call, args, rows_in));
    CGX_TRY(results.add(call, rets, rows_out, /*others=*/1));
    if (rows == 1 && results.size.size() > leaves.size.size()) {
      CGX_TRY(results.split(call, leaves.size.size(), &residuals));
      CGX_TRY(same_leaves(call, leaves, residuals));
    }
    CGX_TRY(same_leaves(call, leaves, results));
    CGX_TRY(build_layout(call, leaves,
                         {bits, bucket_size, rounding, rotation, stream_numbers, world, rows},
                         &owned));
    CGX_TRY(check_count(call, "keys", keys, kScatters ? 2 * world : kGathers ? 2 : 4));
    CGX_TRY(check_divisor(call, divisor));
    if (segment_bytes < 1) return invalid(call, expected("segment_bytes", segment_bytes, 1));
    const Layout layout = owned.view();
    const auto payloads = rets.get<Payload>(rets.size() - 1);
    if (payloads.has_error()) return invalid(call, "payloads: " + payloads.error().message());
    CGX_TRY(
        check_count(call, "payloads", **payloads, CudaFused::scratch_bytes(kCollective, layout)));

    std::string error;
    const NcclLibrary* const nccl = nccl_library(&error);
    if (!nccl) return internal(error);
    NcclComm comm = nullptr;
    CGX_TRY(communicator(collectives, positions, world, &comm));
    int count = 0, rank = -1, state = NcclLibrary::kSuccess;
    for (const int result : {nccl->comm_count(comm, &count), nccl->comm_user_rank(comm, &rank),
                             nccl->comm_get_async_error(comm, &state)}) {
      if (result != NcclLibrary::kSuccess) return internal(nccl->get_error_string(result));
    }
    if (state != NcclLibrary::kSuccess && state != NcclLibrary::kInProgress) {
      return internal(std::string("the communicator has failed: ") + nccl->get_error_string(state));
    }
    if (count != world) return internal(expected("size of the communicator", count, world));

    int device = 0;
    if (const cudaError_t failed = cudaGetDevice(&device); failed != cudaSuccess) {
      return internal(cudaGetErrorString(failed));
    }
    const auto in = repeated(leaves.pointers(rows_in), rows / rows_in);
    const auto out = repeated(results.pointers(rows_out), rows / rows_out);
    const auto lost = residuals.pointers(1);
    const auto dtypes = repeated(leaves.dtype, rows);
    LockedLane& own = lane_of(device);
    const std::lock_guard<std::mutex> lock(own.mutex);
    CudaFused fused({kCollective,
                     layout,
                     {in.data(), dtypes.data()},
                     {out.data(), dtypes.data()},
                     {lost.empty() ? nullptr : lost.data(), dtypes.data()},
                     keys.typed_data(),
                     divisor,
                     rank,
                     segment_bytes,
                     (*payloads)->typed_data()},
                    *nccl, comm, own.lane, stream);
    error = fused.run();
    return error.empty() ? ffi::Error::Success() : internal(error);
  });
}

template <Collective kCollective>
XLA_FFI_Error* call_execute(XLA_FFI_CallFrame* frame) {
  static const auto handler = with_layout(ffi::Ffi::Bind()
                                              .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                              .Ctx<ffi::Extension<Collectives>>()
                                              .Arg<Keys>()
                                              .RemainingArgs()
                                              .RemainingRets())
                                  .Attr<float>("divisor")
                                  .Attr<Ints>("groups")
                                  .Attr<int64_t>("segment_bytes")
                                  .Attr<std::string_view>("name")
                                  .To(execute<kCollective>);
  return handler->Call(frame);
}

}  // namespace

XLA_FFI_Error* nccl_prepare(XLA_FFI_CallFrame* frame) {
  static const auto handler =
      ffi::Ffi::BindPrepare().Ctx<ffi::Extension<Collectives>>().Attrs().To(prepare);
  return handler->Call(frame);
}

XLA_FFI_Error* all_reduce_nccl_execute(XLA_FFI_CallFrame* frame) {
  return call_execute<Collective::kAllReduce>(frame);
}

XLA_FFI_Error* reduce_scatter_nccl_execute(XLA_FFI_CallFrame* frame) {
  return call_execute<Collective::kReduceScatter>(frame);
}

XLA_FFI_Error* all_gather_nccl_execute(XLA_FFI_CallFrame* frame) {
  return call_execute<Collective::kAllGather>(frame);
}

}  // namespace cgx

#endif  // CGX_HAVE_COLLECTIVES
