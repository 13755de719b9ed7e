// One fused all-reduce or gather-sum on the CPU: the schedule over the kernels and a message port.
#ifndef CGX_MESSAGES_FUSED_H_
#define CGX_MESSAGES_FUSED_H_

#include <stdint.h>

#include <memory>
#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/worker_pool.h"
#include "format/layout.h"
#include "format/leaves.h"
#include "messages/buffer_pool.h"
#include "messages/call.h"
#include "messages/transport.h"

namespace cgx {

// What one call reduces, and between which ranks. Leaves belong to the caller, who keeps them until
// the call is over.
struct FusedSpec {
  Collective collective;  // kAllReduce or kGatherSum
  int64_t world;
  OwnedLayout owned;  // with one chunk per rank; for a gather-sum with one chunk
  std::vector<const void*> in;
  std::vector<void*> out;
  std::vector<void*> residuals;  // none, or one per leaf: the errors of this rank's encodings
  std::vector<DType> dtypes;     // of `in` and `residuals`
  // Of `out`. The sum of a gather-sum is still in the leaf's units, and fp32 if the leaf has any.
  std::vector<DType> out_dtypes;
  std::vector<LeafUnits> units;  // none, or one per leaf
  uint32_t keys[4];              // two for encode, two for reduce
  float divisor;
  int64_t rank;
  int tag;  // the first of kCallTags
  Program program;
};

class FusedCall : public Call {
 public:
  FusedCall(FusedSpec spec, const CallSettings& settings, std::unique_ptr<Port> port,
            WorkerPool& workers, BufferPool& buffers);

  bool advance() override;
  bool done() const override { return schedule_.done() && transport_.drained(); }
  const std::string& error() const override { return transport_.error(); }
  std::string awaited() const override { return transport_.awaited(); }
  bool greeted(int64_t peer) const override { return transport_.greeted(peer); }
  void release(BufferPool& buffers) override;

  // The schedule's kernels.
  void encode(int64_t segment);
  void reduce(int64_t segment);
  void decode(int64_t segment);

 private:
  const LeafUnits* units() const { return spec_.units.empty() ? nullptr : spec_.units.data(); }
  LeavesOut residuals() const {
    return {spec_.residuals.empty() ? nullptr : spec_.residuals.data(), spec_.dtypes.data()};
  }
  // Runs a kernel on a chunk's segment, which the workers split between them.
  template <typename KernelCall>
  void run(void (*kernel)(const KernelCall&, int64_t, int64_t), const KernelCall& call,
           int64_t chunk, int64_t segment);
  // Encodes a chunk's segment to its place in u8[layout_.world, chunk_bytes]. `rank` owns one of
  // the chunks, or none (-1).
  void encode_chunk(int64_t chunk, int64_t segment, int64_t rank, uint8_t* payload);

  FusedSpec spec_;
  const Layout layout_;
  const Segments segments_;
  std::unique_ptr<Port> port_;
  WorkerPool& workers_;
  BufferPool::Buffer sent_, received_;
  Scratch scratch_;
  Transport transport_;
  Schedule<FusedCall, Transport> schedule_;
};

}  // namespace cgx

#endif  // CGX_MESSAGES_FUSED_H_
