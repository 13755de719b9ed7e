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

struct PeerSpec {
  Layout layout;
  LeavesIn in;
  LeavesOut out;
  LeavesOut residuals;   // data null: none
  const uint32_t* keys;  // device: two words for encode and two for reduce
  float divisor;
};

// What a device keeps from call to call: a window for each communicator. Windows are memory of this
// module's own, since XLA gives a call's buffers to other operations between two calls: flags
// would not last, and a peer might write before this device has come to the call.
class PeerLane {
 public:
  explicit PeerLane(std::chrono::milliseconds patience = std::chrono::minutes(5))
      : patience_(patience) {}

  // Makes what calls of that layout use on the current device; what went wrong, or "". All ranks of
  // the communicator must come to it, and in one order; it comes before any call.
  std::string prepare(const Layout& layout, const NcclLibrary& nccl, NcclComm comm, int32_t rank);
  // Puts a call on the stream; what went wrong, or "". It reports what an earlier call found too: a
  // launch that waited in vain leaves NaN, and no launch after it sends anything.
  std::string all_reduce(const PeerSpec& spec, NcclComm comm, int32_t rank, cudaStream_t stream);

 private:
  struct Window {
    NcclComm comm;
    NcclWindow window;
    WindowShape shape;
    uint8_t* memory;
    uint32_t* told;    // the host's
    cudaEvent_t last;  // the end of the last call
  };

  Window* find(NcclComm comm, const Layout& layout);
  std::string make(const Layout& layout, const NcclLibrary& nccl, NcclComm comm, int32_t rank);

  const std::chrono::milliseconds patience_;
  std::vector<Window> windows_;
  bool loaded_ = false;
};

}  // namespace cgx

#endif  // CGX_NCCL_PEER_H_
