// What the handlers that use XLA's communicators share: getting a communicator and making its
// device current. Needs the header of the collectives extension.
#ifndef CGX_HANDLERS_COLLECTIVES_H_
#define CGX_HANDLERS_COLLECTIVES_H_

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "handlers/checks.h"
#include "nccl/library.h"
#include "xla/ffi/api/collectives_c_api.h"

namespace cgx {

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
inline std::vector<XLA_FFI_ReplicaGroup> groups_of(Ints positions, int64_t world) {
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

inline ffi::Error taken(const Collectives& collectives, XLA_FFI_Error* error) {
  return error ? ffi::internal::ErrorPolicy::TakeError(collectives.api, error)
               : ffi::Error::Success();
}

// Gets the communicator of this device's group, and the device's rank in it. `call` prefixes error
// messages.
inline ffi::Error communicator(const std::string& call, const Collectives& collectives,
                               const NcclLibrary& nccl, Ints positions, int64_t world,
                               NcclComm* comm, int* rank) {
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

}  // namespace cgx

#endif  // CGX_HANDLERS_COLLECTIVES_H_
