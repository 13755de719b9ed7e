// The all-reduce over peers' memory (cuda/peer.h) on windows of XLA's communicator.
#ifndef CGX_NCCL_PEER_H_
#define CGX_NCCL_PEER_H_

#include <stdint.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "cuda/peer.h"
#include "nccl/library.h"

namespace cgx {

// How ranks meet.
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

// What a device keeps from call to call: a window for each communicator. This module allocates the
// windows itself, because XLA gives a call's buffers to other operations between two calls: flags
// would not last, and a peer might write before this device has reached the call.
class PeerLane {
 public:
  // Creates what calls with that layout use on the current device. Returns what went wrong, or "".
  // All ranks of the communicator must call it, in the same order, before any call. It waits for
  // them for up to the timeout.
  std::string prepare(const Layout& layout, const PeerHow& how, const NcclLibrary& nccl,
                      NcclComm comm, int32_t rank);
  // Puts a call on the stream. Returns what went wrong, or "". It also reports that an earlier call
  // has failed: a launch that waited in vain leaves NaN, and no launch after it sends anything.
  std::string all_reduce(const PeerSpec& spec, NcclComm comm, int32_t rank, cudaStream_t stream);

 private:
  struct Window {
    NcclComm comm;
    int mark;  // gone if another communicator has the same address, and knows no window
    WindowShape shape;
    WindowState* state;
    uint32_t* told;    // host memory
    cudaEvent_t last;  // the end of the last call
  };

  Window* find(NcclComm comm, const Layout& layout, bool in_host);
  std::string make(const Layout& layout, const PeerHow& how, const NcclLibrary& nccl, NcclComm comm,
                   int32_t rank);

  std::vector<Window> windows_;
  cudaStream_t stream_ = nullptr;
  bool loaded_ = false;
};

}  // namespace cgx

#endif  // CGX_NCCL_PEER_H_
