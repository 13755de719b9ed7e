// What a device keeps from call to call of the fused calls: streams, events, and the communicators
// whose messages travel side by side.
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

// One after the other, a communicator's messages on a stream.
struct Wire {
  NcclComm comm;
  cudaStream_t stream;
};

// How long NCCL may take for what needs all ranks. The first messages of a communicator, and a new
// one, take seconds; where a rank is missing, they never end.
constexpr std::chrono::milliseconds kPatience = std::chrono::seconds(60);

class CudaLane {
 public:
  // Makes what calls of up to `segments` segments use on the current device; what went wrong, or
  // "". Comes before any call, and no call makes anything: CUDA may then wait for all work on the
  // device, and messages there wait for ranks that this process still has to start.
  std::string prepare(int64_t segments);
  // Makes `streams` wires for calls on `comm`, whose messages then travel at once; what went wrong,
  // or "". It comes where prepare does. One wire needs no call of it. With more, all ranks come to
  // it in one order.
  std::string connect(int64_t streams, const NcclLibrary& nccl, NcclComm comm, int32_t rank,
                      std::chrono::milliseconds patience = kPatience);

  // The first is on `comm` itself. None where the two above have not made as many.
  std::vector<Wire> wires(NcclComm comm, int64_t streams);
  // One for the order of streams as messages are posted, and one for each phase of a segment.
  const std::vector<cudaEvent_t>& events() const { return events_; }
  static int64_t events_of(int64_t segments) { return 1 + 2 * segments; }

 private:
  // Communicators of the same ranks in the same order as `comm`. They are never freed: a peer that
  // is late may still send on them, and NCCL may still write where one that took too long should
  // be.
  struct Family {
    NcclComm comm;
    int mark =
        0;  // an operator of `comm`, which is gone where another communicator lies in its place
    NcclComm stem = nullptr;
    std::array<NcclComm, kMostStreams - 1> made = {};
    int64_t count = 0;  // of them that are made
    std::string error;  // which stays: no rank knows how far the others came
  };

  Family* find(NcclComm comm);
  std::string current(const NcclLibrary& nccl, NcclComm comm, Family** family);
  static std::string grow(Family* family, int64_t count, const NcclLibrary& nccl, int32_t rank,
                          std::chrono::milliseconds patience);

  std::vector<cudaStream_t> streams_;
  std::vector<cudaEvent_t> events_;
  std::list<Family> families_;  // the newest of a communicator comes first
  bool loaded_ = false;
};

}  // namespace cgx

#endif  // CGX_NCCL_LANE_H_
