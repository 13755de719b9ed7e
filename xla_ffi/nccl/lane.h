// What a device keeps between fused calls: streams, events, and the communicators whose messages
// travel side by side.
#ifndef CGX_NCCL_LANE_H_
#define CGX_NCCL_LANE_H_

#include <cuda_runtime_api.h>
#include <stdint.h>

#include <array>
#include <chrono>
#include <list>
#include <string>
#include <vector>

#include "nccl/library.h"

namespace cgx {

constexpr int64_t kMostStreams = 8;

// A communicator and the stream on which its messages run, one after the other.
struct Wire {
  NcclComm comm;
  cudaStream_t stream;
};

// How long NCCL may take for operations that need all ranks. A new communicator and its first
// messages take seconds. If a rank is missing, they never end.
constexpr std::chrono::milliseconds kPatience = std::chrono::seconds(60);

class CudaLane {
 public:
  // Creates what calls of up to `segments` segments use on the current device. Returns what went
  // wrong, or "". Must come before any call, because calls create nothing: creating something may
  // make CUDA wait for all work on the device, and messages there may wait for ranks that this
  // process still has to start.
  std::string prepare(int64_t segments);
  // Creates `streams` wires for calls on `comm`, so that their messages travel at once, and
  // connects all ranks on each. Returns what went wrong, or "". Call it where prepare is called, on
  // all ranks in the same order.
  std::string connect(int64_t streams, const NcclLibrary& nccl, NcclComm comm, int32_t rank,
                      int64_t world, std::chrono::milliseconds patience = kPatience);

  // The first wire is on `comm` itself. Empty if prepare and connect have not created that many.
  std::vector<Wire> wires(NcclComm comm, int64_t streams);
  // One event that orders streams when messages are posted, and one for each phase of a segment.
  const std::vector<cudaEvent_t>& events() const { return events_; }
  static int64_t events_of(int64_t segments) { return 1 + 2 * segments; }

 private:
  // Communicators of the same ranks in the same order as `comm`. They are never freed: a late peer
  // may still send on them, and NCCL may still write the handle of one that took too long.
  struct Family {
    NcclComm comm;
    int64_t generation = 0;
    NcclComm stem = nullptr;
    std::array<NcclComm, kMostStreams - 1> made = {};
    int64_t count = 0;      // how many of `made` exist
    int64_t connected = 0;  // how many wires, the one on `comm` included
    std::string error;      // is permanent: no rank knows how far the others got
  };

  Family* find(NcclComm comm);  // the newest
  std::string current(const NcclLibrary& nccl, NcclComm comm, Family** family);
  static std::string grow(Family* family, int64_t count, int blocks, const NcclLibrary& nccl,
                          int32_t rank, std::chrono::milliseconds patience);
  std::string greet(Family* family, int64_t count, const NcclLibrary& nccl, int32_t rank,
                    int64_t world);

  std::vector<cudaStream_t> streams_;
  std::vector<cudaEvent_t> events_;
  std::list<Family> families_;  // a communicator's newest family comes first
  uint8_t* bytes_ = nullptr;    // device memory for what connects ranks; never freed
  int64_t ranks_ = 0;           // that it is for
  bool loaded_ = false;
};

}  // namespace cgx

#endif  // CGX_NCCL_LANE_H_
