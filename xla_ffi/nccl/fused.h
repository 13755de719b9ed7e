// One fused all-reduce, one half of an all-reduce, or an all-reduce in a single phase, on a GPU. It
// runs the schedule over the CUDA kernels and NCCL, on several streams.
//
// Kernels go to the caller's stream. Messages go to wires (nccl/lane.h), which take segments in
// turn. Events order kernels and messages, so a segment travels while the next one is encoded. The
// host does not wait for any stream.
//
// Every rank posts the same messages in the same order and on the same wires. So a message waits
// only for earlier messages, whatever the order in which streams reach them.
#ifndef CGX_NCCL_FUSED_H_
#define CGX_NCCL_FUSED_H_

#include <stdint.h>

#include <string>
#include <vector>

#include "cuda/codec.h"
#include "nccl/lane.h"
#include "schedule/schedule.h"
#include "schedule/segments.h"

namespace cgx {

struct CudaFusedSpec {
  Collective collective;
  // Except for an all-reduce, the layout repeats the leaves for each rank. Each rank's leaves are
  // its chunk.
  Layout layout;
  LeavesIn in;  // an all-gather and a gather-sum read only this rank's
  // A reduce-scatter and a gather-sum write only this rank's. The sum of a gather-sum is still in
  // the leaf's units, and fp32 if the leaf has any.
  LeavesOut out;
  LeavesOut residuals;  // data null: none; only for an all-reduce and a gather-sum
  // Device memory. All-reduce: two words for encode and two for reduce. Reduce-scatter: two words
  // for each rank's leaves. The others: two words.
  const uint32_t* keys;
  float divisor;
  int32_t rank;
  int64_t segment_bytes;
  int64_t streams;   // wires
  uint8_t* scratch;  // device, scratch_bytes()
  // Null, or one per leaf of the layout, with arrays in device memory; only for an all-reduce and a
  // gather-sum.
  const LeafUnits* units = nullptr;
};

class CudaFused {
 public:
  CudaFused(const CudaFusedSpec& spec, const NcclLibrary& nccl, NcclComm comm, CudaLane& lane,
            cudaStream_t stream);

  // NCCL copies single bytes if 16 does not divide an address, and records come in multiples of 4
  // bytes. So every segment starts at a multiple of a cache line in its row. Compared with the rows
  // of the wire format, this moves a segment by less than one line for itself, plus one line for
  // each segment before it.
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

  // Puts the whole call on the streams. Returns what went wrong, or "". Whatever fails, work that
  // is put on the caller's stream later starts after all streams are done with this call's memory.
  // So this waits as long as NCCL takes to put messages on a stream; an abort ends the wait.
  std::string run();

  // The schedule's kernels.
  void encode(int64_t segment);
  void reduce(int64_t segment);
  void decode(int64_t segment);
  // The schedule's transport. A stream waits by itself, so arrived() always returns true.
  void post(Phase phase, int64_t segment);
  bool arrived(Phase phase, int64_t segment);

 private:
  static int64_t aligned(int64_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  void encode(const std::vector<Range>& ranges, int32_t own, int32_t key_step);
  bool has(Phase phase) const { return cgx::has(spec_.collective, phase); }
  Range range(int64_t chunk, int64_t segment) const;
  uint8_t* place(uint8_t* rows, int64_t row, int64_t chunk, int64_t segment) const;
  cudaEvent_t event(Phase phase, int64_t segment) const;
  const Wire& wire(int64_t segment) const { return wires_[segment % wires_.size()]; }
  void note(std::string error);  // keeps the first
  void check(cudaError_t error) { note(said(error)); }

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
