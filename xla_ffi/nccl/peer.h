// The all-reduce over peers' memory (cuda/peer.h) on windows of XLA's communicator.
#ifndef CGX_NCCL_PEER_H_
#define CGX_NCCL_PEER_H_

#include <stdint.h>

#include <chrono>
#include <string>
#include <vector>

#include "cuda/peer.h"
#include "nccl/library.h"

namespace cgx {

// How long making a window may take, at least. The tests set their own limit.
#if !defined(CGX_PEER_SETUP_MS)
#define CGX_PEER_SETUP_MS 60'000
#endif
constexpr std::chrono::milliseconds kPeerSetup(CGX_PEER_SETUP_MS);

struct PeerHow {
  std::chrono::milliseconds timeout;  // how long a call waits for another rank
  bool in_host;                       // windows lie in host memory, not in that of the devices
};

struct PeerSpec {
  Layout layout;
  LeavesIn in;
  LeavesOut out;
  LeavesOut residuals;     // data null: none
  const LeafUnits* units;  // one per leaf, or null
  const uint32_t* keys;    // device: two words for encode and two for reduce
  float divisor;
  PeerHow how;
};

// What a device keeps from call to call: windows of each communicator in each kind of memory. This
// module allocates the windows itself, because XLA gives a call's buffers to other operations
// between two calls: flags would not last, and a peer might write before this device has reached
// the call.
class PeerLane {
 public:
  // Creates what calls with that layout use on the current device. Returns what went wrong, or "".
  // All ranks of the communicator must call it, in the same order, before any call. It waits for
  // them: inside NCCL until they are connected, and then for up to kPeerSetup or the timeout.
  std::string prepare(const Layout& layout, const PeerHow& how, const NcclLibrary& nccl,
                      NcclComm comm, int32_t rank);
  // Puts a call on the stream. Returns what went wrong, or "". It also reports that an earlier call
  // has failed: a launch that waited in vain leaves NaN, and no launch after it sends anything.
  std::string all_reduce(const PeerSpec& spec, NcclComm comm, int32_t rank, cudaStream_t stream);

 private:
  struct Window {
    NcclComm comm;
    int64_t generation;  // of the communicator
    WindowShape shape;
    WindowState* state;
    uint32_t* told;    // host memory
    cudaEvent_t last;  // the end of the last call
  };

  const Window* find(NcclComm comm, const Layout& layout, bool in_host) const;
  // That a launch on this communicator has given up; "" if none has.
  std::string gave_up(NcclComm comm, const PeerHow& how) const;
  std::string make(const Layout& layout, const PeerHow& how, const NcclLibrary& nccl, int32_t rank,
                   Window* made);

  std::vector<Window> windows_;
  // What ranks meet with. Abandoned after an error, because messages may still wait there.
  cudaStream_t stream_ = nullptr;
  void* board_ = nullptr;  // device memory for a note of each rank
  bool loaded_ = false;
};

}  // namespace cgx

#endif  // CGX_NCCL_PEER_H_
