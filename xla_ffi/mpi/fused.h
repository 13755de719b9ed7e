// One fused all-reduce on the CPU: the schedule over the kernels and a message port.
#ifndef CGX_MPI_FUSED_H_
#define CGX_MPI_FUSED_H_

#include <stdint.h>

#include <memory>
#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/scratch.h"
#include "cpu/worker_pool.h"
#include "format/layout.h"
#include "format/leaves.h"
#include "mpi/buffer_pool.h"
#include "mpi/call.h"
#include "mpi/transport.h"

namespace cgx {

// What one call reduces, and among whom. Leaves belong to the caller until the call is over.
struct FusedSpec {
  OwnedLayout owned;
  std::vector<const void*> in;
  std::vector<void*> out;
  std::vector<void*> residuals;  // none, or one a leaf: what this rank's encodings lost
  std::vector<DType> dtypes;
  std::vector<LeafUnits> units;  // none, or one a leaf
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
  template <typename F>
  void split(int64_t from, int64_t to, F&& f);

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

#endif  // CGX_MPI_FUSED_H_
