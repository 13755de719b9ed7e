// One fused all-reduce, or one half of it, on a GPU: the schedule over the CUDA kernels and NCCL,
// on two streams.
//
// Kernels go to the caller's stream, messages to a second one, and events order the two: a segment
// travels while the next is encoded. Nothing waits on the host.
#ifndef CGX_NCCL_FUSED_H_
#define CGX_NCCL_FUSED_H_

#include <stdint.h>

#include <chrono>
#include <string>
#include <vector>

#include "cuda/codec.h"
#include "nccl/library.h"
#include "schedule/schedule.h"
#include "schedule/segments.h"

namespace cgx {

struct CudaFusedSpec {
  Collective collective;
  // Of the halves of an all-reduce: the leaves once for every rank, so that they are its chunk.
  Layout layout;
  LeavesIn in;          // of an all-gather: this rank's alone are read
  LeavesOut out;        // of a reduce-scatter: this rank's alone are written
  LeavesOut residuals;  // data null: none; of an all-reduce alone
  // Device. Two words for encode and two for reduce; of a reduce-scatter two for every rank's
  // leaves, of an all-gather two.
  const uint32_t* keys;
  float divisor;
  int32_t rank;
  int64_t segment_bytes;
  uint8_t* scratch;  // device, scratch_bytes()
  // How long a communicator may take to put messages on its stream. It connects to its peers at the
  // first ones, which takes seconds; where a rank is missing, it never ends.
  std::chrono::milliseconds patience = std::chrono::seconds(60);
};

// What a device keeps from call to call.
struct CudaLane {
  cudaStream_t wire = nullptr;
  std::vector<cudaEvent_t> events;
  bool loaded = false;

  // Makes what calls of up to `segments` segments use on the current device; what went wrong, or
  // "". Comes before any call, and no call makes anything: CUDA may then wait for all work on the
  // device, and messages there wait for ranks that this process still has to start.
  std::string prepare(int64_t segments);
};

class CudaFused {
 public:
  CudaFused(const CudaFusedSpec& spec, const NcclLibrary& nccl, NcclComm comm, CudaLane& lane,
            cudaStream_t stream);

  // NCCL copies single bytes where 16 does not divide an address, and records come in multiples of
  // 4 bytes. So every segment starts at a multiple of a cache line in its row, further than the
  // wire's own rows have it by less than a line for itself and for each segment before it.
  static constexpr int64_t kAlignment = 128;
  static int64_t row_bytes(const Layout& layout, int64_t segment_bytes) {
    return aligned(layout.chunk_bytes) + kAlignment * segments(layout, segment_bytes);
  }
  static int64_t scratch_bytes(Collective collective, const Layout& layout, int64_t segment_bytes) {
    const int64_t rows = (collective == Collective::kAllGather ? 1 : 2) * layout.world;
    return rows * row_bytes(layout, segment_bytes);
  }
  static int64_t segments(const Layout& layout, int64_t segment_bytes) {
    return Segments(layout, segment_bytes).count();
  }

  // Puts the whole call on the streams; what went wrong, or "". Whatever happens, work that comes
  // later on the caller's stream finds both streams done with this call's memory.
  std::string run();

  // The schedule's kernels.
  void encode(int64_t segment);
  void reduce(int64_t segment);
  void decode(int64_t segment);
  // The schedule's transport. A stream waits by itself, so everything has arrived.
  void post(Phase phase, int64_t segment);
  bool arrived(Phase phase, int64_t segment);

 private:
  static int64_t aligned(int64_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  bool has(Phase phase) const { return cgx::has(spec_.collective, phase); }
  Range range(int64_t chunk, int64_t segment) const;
  uint8_t* place(uint8_t* rows, int64_t row, int64_t chunk, int64_t segment) const;
  cudaEvent_t event(Phase phase, int64_t segment) const;
  int settled(int result);
  void check(cudaError_t error);
  void check_nccl(const char* call, int result);

  const CudaFusedSpec spec_;
  const NcclLibrary& nccl_;
  const NcclComm comm_;
  CudaLane& lane_;
  const cudaStream_t stream_;
  const Segments segments_;
  const Layout rows_;                      // the layout with rows of row_bytes()
  uint8_t *const sent_, *const received_;  // u8[world, row_bytes()]
  std::string error_;
};

}  // namespace cgx

#endif  // CGX_NCCL_FUSED_H_
