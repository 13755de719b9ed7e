#include "handlers/nccl.h"

#if CGX_HAVE_COLLECTIVES

#include <cuda_runtime_api.h>

#include <chrono>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "handlers/operands.h"
#include "nccl/fused.h"
#include "nccl/library.h"
#include "nccl/peer.h"
#include "xla/ffi/api/collectives_c_api.h"

namespace cgx {
namespace {

// --- what all calls share: getting a communicator and making its device current

// Access to XLA's communicators. The extension grows only at its end, and this code uses only what
// version 0.1 has, so every later 0.x works too. The wrapper in XLA's headers accepts only the
// version that it was built against.
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

// The communication id of XLA's own collectives: with it, a call shares their communicator.
constexpr int64_t kCommunication = 0;

// Converts mesh positions, listed group by group, to the runtime's groups.
std::vector<XLA_FFI_ReplicaGroup> groups_of(Ints positions, int64_t world) {
  std::vector<XLA_FFI_ReplicaGroup> groups;
  for (size_t i = 0; i < positions.size(); i += world) {
    groups.push_back({positions.begin() + i, static_cast<size_t>(world)});
  }
  return groups;
}

// The arguments that requesting a communicator and getting it have in common.
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

// Gets the communicator of this device's group, and the device's rank in it. `call` prefixes error
// messages.
ffi::Error communicator(const std::string& call, const Collectives& collectives,
                        const NcclLibrary& nccl, Ints positions, int64_t world, NcclComm* comm,
                        int* rank) {
  const auto groups = groups_of(positions, world);
  auto args = arguments<XLA_FFI_Communicator_Get_Args>(groups);
  args.struct_size = XLA_FFI_Communicator_Get_Args_STRUCT_SIZE;
  CGX_TRY(
      taken(collectives, collectives.extension->get_communicator(collectives.extension, &args)));
  *comm = reinterpret_cast<NcclComm>(args.communicator);
  const auto internal = [&](const std::string& text) {
    return ffi::Error::Internal(call + ": " + text);
  };
  int count = 0, state = NcclLibrary::kSuccess;
  const struct {
    const char* name;
    int result;
  } asked[] = {{"ncclCommCount", nccl.comm_count(*comm, &count)},
               {"ncclCommUserRank", nccl.comm_user_rank(*comm, rank)},
               {"ncclCommGetAsyncError", nccl.comm_get_async_error(*comm, &state)}};
  for (const auto& [name, result] : asked) {
    if (result != NcclLibrary::kSuccess) return internal(nccl.said(name, result));
  }
  if (state != NcclLibrary::kSuccess && state != NcclLibrary::kInProgress) {
    return internal(nccl.said("the communicator has failed", state));
  }
  if (count != world) return internal(expected("size of the communicator", count, world));
  return ffi::Error::Success();
}

template <typename Lane>
struct Locked {
  std::mutex mutex;
  Lane lane;
};

// The lane of a device. Devices of one process may wait for each other inside NCCL, so each lane
// has its own lock.
template <typename Lane>
Locked<Lane>& lane_of(int device) {
  static std::mutex mutex;
  static auto* const lanes = new std::map<int, Locked<Lane>>;  // they outlive static destructors
  const std::lock_guard<std::mutex> lock(mutex);
  return (*lanes)[device];
}

// Makes a device current, and restores the previous one at the end of the scope. The runtime does
// not promise which device is current when a handler starts, and code that runs later on this
// thread relies on the device that it left current.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    error_ = cudaGetDevice(&before_);
    if (error_ == cudaSuccess) error_ = cudaSetDevice(device);
  }
  ~CurrentDevice() {
    if (error_ == cudaSuccess) cudaSetDevice(before_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  std::string error() const { return said(error_); }

 private:
  int before_ = 0;
  cudaError_t error_;
};

// Calls run(lane, nccl, comm, rank) with the lane of a call's device, which is current meanwhile.
// `run` returns what went wrong; empty if nothing did.
template <typename Lane, typename Run>
ffi::Error with_lane(const std::string& call, int32_t device, const Collectives& collectives,
                     Ints groups, int64_t world, Run run) {
  const auto failed = [&](const std::string& text) {
    return text.empty() ? ffi::Error::Success() : ffi::Error::Internal(call + ": " + text);
  };
  std::string text;
  const NcclLibrary* const nccl = nccl_library(&text);
  if (!nccl) return failed(text);
  NcclComm comm = nullptr;
  int rank = -1;
  CGX_TRY(communicator(call, collectives, *nccl, groups, world, &comm, &rank));
  const CurrentDevice current(device);
  if (text = current.error(); !text.empty()) return failed(text);
  Locked<Lane>& own = lane_of<Lane>(device);
  const std::lock_guard<std::mutex> lock(own.mutex);
  return failed(run(own.lane, *nccl, comm, rank));
}

// --- the calls

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

// A call with the operands, results and attributes that all calls have.
template <Collective kCollective>
struct Call {
  static constexpr bool kReduces = kCollective == Collective::kAllReduce;
  static constexpr bool kScatters = kCollective == Collective::kReduceScatter;
  static constexpr bool kGathers = kCollective == Collective::kAllGather;

  std::string name;
  int64_t rows = 1, rows_in = 1, rows_out = 1;
  Leaves leaves, results, residuals;
  Units units;
  OwnedLayout owned;
  const uint32_t* keys = nullptr;
  float divisor = 1;
  Ints groups;

  // The last `others` results are not leaves. Units are for buckets of up to `longest_in_units`.
  ffi::Error check(Keys key, ffi::RemainingArgs args, ffi::RemainingRets rets, Ints slots,
                   int64_t world, float by, Ints positions, int64_t longest_in_units,
                   size_t others = 0) {
    CGX_TRY(check_world(name, world));
    CGX_TRY(check_groups(name, positions, world));
    rows = kReduces ? 1 : world;
    rows_in = kScatters ? world : 1, rows_out = kGathers ? world : 1;
    const LayoutAttributes attributes{slots, world, rows,
                                      kScatters || kGathers ? 0 : longest_in_units};
    Leaves unit_operand;
    CGX_TRY(leaves.add(name, args, rows_in));
    CGX_TRY(split_units(name, attributes, &leaves, &unit_operand));
    CGX_TRY(results.add(name, rets, rows_out, others));
    if (!kScatters && !kGathers && results.size.size() > leaves.size.size()) {
      CGX_TRY(results.split(name, leaves.size.size(), &residuals));
      CGX_TRY(same_leaves(name, leaves, residuals));
    }
    CGX_TRY(build_layout(name, leaves.size, attributes, &owned));
    CGX_TRY(same_leaves(name, sums_of<kCollective>(leaves, attributes), results));
    CGX_TRY(units.add(name, leaves, unit_operand, attributes));
    CGX_TRY(check_count(name, "keys", key, kScatters ? 2 * world : kReduces ? 4 : 2));
    keys = key.typed_data(), divisor = by, groups = positions;
    return check_divisor(name, by);
  }
};

// A call's stages. A call has attributes(binding), which binds those of its own, and check().
// prepare(lane, nccl, comm, rank) and run(lane, nccl, comm, rank, stream) return what went wrong.
template <typename Call>
struct StagesOf {
  template <typename Binding>
  static auto bind(Binding&& binding) {
    return Call::attributes(std::forward<Binding>(binding)
                                .template Ctx<ffi::DeviceOrdinal>()
                                .template Ctx<ffi::Extension<Collectives>>()
                                .template Attr<std::string_view>("name")
                                .template Arg<Keys>()
                                .RemainingArgs()
                                .RemainingRets()
                                .template Attr<Ints>("slots")
                                .template Attr<int64_t>("world")
                                .template Attr<float>("divisor")
                                .template Attr<Ints>("groups"));
  }
  // Checks a call and hands it to `f`, with what with_lane() gives.
  template <typename F, typename... Given>
  static ffi::Error checked(F f, int32_t device, const Collectives& collectives,
                            std::string_view name, const Given&... given) {
    Call call;
    call.name = name;
    return no_throw(call.name.c_str(), [&]() -> ffi::Error {
      CGX_TRY(call.check(given...));
      return with_lane<typename Call::Lane>(
          call.name, device, collectives, call.groups, call.owned.view().world,
          [&](auto& lane, const NcclLibrary& nccl, NcclComm comm, int rank) {
            return f(call, lane, nccl, comm, rank);
          });
    });
  }
  static XLA_FFI_Error* initialize(XLA_FFI_CallFrame* frame) {
    static const auto handler = bind(ffi::Ffi::BindInitialize()).To([](const auto&... given) {
      return checked([](Call& call, auto&&... where) { return call.prepare(where...); }, given...);
    });
    return handler->Call(frame);
  }
  static XLA_FFI_Error* execute(XLA_FFI_CallFrame* frame) {
    static const auto handler =
        bind(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>())
            .To([](cudaStream_t stream, const auto&... given) {
              return checked(
                  [stream](Call& call, auto&&... where) { return call.run(where..., stream); },
                  given...);
            });
    return handler->Call(frame);
  }
  static constexpr Stages get() { return {initialize, execute}; }
};

template <Collective kCollective>
struct NcclCall : Call<kCollective> {
  using Lane = CudaLane;

  int64_t segment_bytes, streams;
  uint8_t* payloads;

  template <typename Binding>
  static auto attributes(Binding&& binding) {
    return std::forward<Binding>(binding)
        .template Attr<int64_t>("segment_bytes")
        .template Attr<int64_t>("streams");
  }
  ffi::Error check(Keys key, ffi::RemainingArgs args, ffi::RemainingRets rets, Ints slots,
                   int64_t world, float by, Ints positions, int64_t bytes, int64_t count) {
    const std::string& name = this->name;
    CGX_TRY(Call<kCollective>::check(key, args, rets, slots, world, by, positions, kTileValues,
                                     /*others=*/1));
    if (bytes < 1) return invalid(name, expected("segment_bytes", bytes, 1));
    CGX_TRY(check_within(name, "streams", count, kMostStreams));
    const auto last = rets.get<Payload>(rets.size() - 1);
    if (last.has_error()) return invalid(name, "payloads: " + last.error().message());
    segment_bytes = bytes, streams = count, payloads = (*last)->typed_data();
    return check_count(name, "payloads", **last,
                       CudaFused::scratch_bytes(kCollective, this->owned.view(), bytes));
  }
  std::string prepare(CudaLane& lane, const NcclLibrary& nccl, NcclComm comm, int rank) const {
    const Layout layout = this->owned.view();
    std::string error = lane.prepare(CudaFused::segments(layout, segment_bytes));
    if (error.empty()) error = lane.connect(streams, nccl, comm, rank, layout.world);
    return error;
  }
  std::string run(CudaLane& lane, const NcclLibrary& nccl, NcclComm comm, int rank,
                  cudaStream_t stream) const {
    const int64_t rows = this->rows, rows_in = this->rows_in, rows_out = this->rows_out;
    const auto in = repeated(this->leaves.pointers(rows_in), rows / rows_in);
    const auto out = repeated(this->results.pointers(rows_out), rows / rows_out);
    const auto lost = repeated(this->residuals.pointers(1), rows);
    const auto dtypes = repeated(this->leaves.dtype, rows);
    const auto sums = repeated(this->results.dtype, rows);
    const auto units = repeated(this->units.first, rows);
    const CudaFusedSpec spec{kCollective,
                             this->owned.view(),
                             {in.data(), dtypes.data()},
                             {out.data(), sums.data()},
                             {lost.empty() ? nullptr : lost.data(), dtypes.data()},
                             this->keys,
                             this->divisor,
                             rank,
                             segment_bytes,
                             streams,
                             payloads,
                             units.empty() ? nullptr : units.data()};
    return CudaFused(spec, nccl, comm, lane, stream).run();
  }
};

struct PeerCall : Call<Collective::kAllReduce> {
  using Lane = PeerLane;

  PeerHow how;

  template <typename Binding>
  static auto attributes(Binding&& binding) {
    return std::forward<Binding>(binding).template Attr<int64_t>("in_host").template Attr<int64_t>(
        "timeout_ms");
  }
  ffi::Error check(Keys key, ffi::RemainingArgs args, ffi::RemainingRets rets, Ints slots,
                   int64_t world, float by, Ints positions, int64_t in_host, int64_t timeout_ms) {
    CGX_TRY(Call::check(key, args, rets, slots, world, by, positions, kMaxBucket));
    constexpr int64_t kLongestTimeout = 1'000'000'000'000;  // ms: its nanoseconds fit into 64 bits
    if (timeout_ms < 1 || timeout_ms > kLongestTimeout) {
      return must_be(name, "timeout_ms", timeout_ms, "in [1, 10^12]");
    }
    if (in_host != 0 && in_host != 1) return must_be(name, "in_host", in_host, "0 or 1");
    how = {std::chrono::milliseconds(timeout_ms), in_host == 1};
    return ffi::Error::Success();
  }
  std::string prepare(PeerLane& lane, const NcclLibrary& nccl, NcclComm comm, int rank) const {
    return lane.prepare(owned.view(), how, nccl, comm, rank);
  }
  std::string run(PeerLane& lane, const NcclLibrary&, NcclComm comm, int rank,
                  cudaStream_t stream) const {
    const auto in = leaves.pointers(1), out = results.pointers(1), lost = residuals.pointers(1);
    const DType* const dtypes = leaves.dtype.data();
    return lane.all_reduce({owned.view(),
                            {in.data(), dtypes},
                            {out.data(), dtypes},
                            {lost.empty() ? nullptr : lost.data(), dtypes},
                            units.first.empty() ? nullptr : units.first.data(),
                            keys,
                            divisor,
                            how},
                           comm, rank, stream);
  }
};

}  // namespace

XLA_FFI_Error* nccl_prepare(XLA_FFI_CallFrame* frame) {
  static const auto handler =
      ffi::Ffi::BindPrepare().Ctx<ffi::Extension<Collectives>>().Attrs().To(prepare);
  return handler->Call(frame);
}

Stages nccl_stages(Collective collective) {
  switch (collective) {
    case Collective::kAllReduce:
      return StagesOf<NcclCall<Collective::kAllReduce>>::get();
    case Collective::kReduceScatter:
      return StagesOf<NcclCall<Collective::kReduceScatter>>::get();
    case Collective::kAllGather:
      return StagesOf<NcclCall<Collective::kAllGather>>::get();
    default:
      return StagesOf<NcclCall<Collective::kGatherSum>>::get();
  }
}

Stages peer_stages() { return StagesOf<PeerCall>::get(); }

}  // namespace cgx

#endif  // CGX_HAVE_COLLECTIVES
