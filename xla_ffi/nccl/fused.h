// One fused all-reduce, one half of it, or one in a single phase, on a GPU: the schedule over the
// CUDA kernels and NCCL, on several streams.
//
// Kernels go to the caller's stream, messages to wires (nccl/lane.h), segment after segment in
// turn, and events order them: segments travel while the next is encoded. Nothing waits on the
// host.
//
// Every rank posts the same messages in the same order, on the same wire each. So a message waits
// for none but earlier ones, whatever the order in which streams come to theirs.
#ifndef CGX_NCCL_FUSED_H_
#define CGX_NCCL_FUSED_H_

#include <stdint.h>

#include <chrono>
#include <string>
#include <vector>

#include "cuda/codec.h"
#include "nccl/lane.h"
#include "schedule/schedule.h"
#include "schedule/segments.h"

namespace cgx {

struct CudaFusedSpec {
  Collective collective;
  // Of all but an all-reduce: the leaves once for every rank, so that they are its chunk.
  Layout layout;
  LeavesIn in;          // of an all-gather and a gather-sum: this rank's alone are read
  LeavesOut out;        // of a reduce-scatter and a gather-sum: this rank's alone are written
  LeavesOut residuals;  // data null: none; of an all-reduce and a gather-sum alone
  // Device. Two words for encode and two for reduce; of a reduce-scatter two for every rank's
  // leaves, of the others two.
  const uint32_t* keys;
  float divisor;
  int32_t rank;
  int64_t segment_bytes;
  int64_t streams;   // wires
  uint8_t* scratch;  // device, scratch_bytes()
  // How long a communicator may take to put messages on its stream.
  std::chrono::milliseconds patience = kPatience;
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
    const int64_t rows = (cgx::has(collective, Phase::kScatter) ? 2 : 1) * layout.world;
    return rows * row_bytes(layout, segment_bytes);
  }
  static int64_t segments(const Layout& layout, int64_t segment_bytes) {
    return Segments(layout, segment_bytes).count();
  }

  // Puts the whole call on the streams; what went wrong, or "". Whatever happens, work that comes
  // later on the caller's stream finds all streams done with this call's memory.
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
  const Wire& wire(int64_t segment) const { return wires_[segment % wires_.size()]; }
  int settled(NcclComm comm, int result);
  void check(cudaError_t error);
  void check_nccl(const char* call, int result);

  const CudaFusedSpec spec_;
  const NcclLibrary& nccl_;
  const std::vector<Wire> wires_;
  const std::vector<cudaEvent_t>& events_;
  const cudaStream_t stream_;
  const Segments segments_;
  const Layout rows_;                      // the layout with rows of row_bytes()
  uint8_t *const sent_, *const received_;  // u8[world, row_bytes()]
  std::string error_;
};

}  // namespace cgx

#endif  // CGX_NCCL_FUSED_H_
