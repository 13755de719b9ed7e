#include "nccl/fused.h"

#include <utility>

namespace cgx {
namespace {

// No window limits the segments in flight, because every segment has its own memory.
constexpr int64_t kNoWindow = int64_t{1} << 62;

Layout with_rows(Layout layout, int64_t bytes) {
  layout.chunk_bytes = bytes;
  return layout;
}

}  // namespace

CudaFused::CudaFused(const CudaFusedSpec& spec, const NcclLibrary& nccl, NcclComm comm,
                     CudaLane& lane, cudaStream_t stream)
    : spec_(spec),
      nccl_(nccl),
      wires_(lane.wires(comm, spec.streams)),
      events_(lane.events()),
      stream_(stream),
      segments_(spec.layout, spec.segment_bytes),
      rows_(with_rows(spec.layout, row_bytes(spec.layout, spec.segment_bytes))),
      sent_(spec.scratch),
      received_(spec.scratch + rows_.world * rows_.chunk_bytes) {}

std::string CudaFused::run() {
  if (wires_.empty() ||
      static_cast<int64_t>(events_.size()) < CudaLane::events_of(segments_.count())) {
    return "the stage Initialize of this call has not run on its device";
  }
  Schedule<CudaFused, CudaFused> schedule(segments_.count(), kNoWindow, *this, *this);
  while (error_.empty() && schedule.step()) {
  }
  if (!error_.empty()) {
    // The caller frees the memory now, so its stream must wait for what the wires still do. If CUDA
    // cannot order the streams, the host waits.
    for (const Wire& wire : wires_) {
      cudaError_t error = cudaEventRecord(events_[0], wire.stream);
      if (error == cudaSuccess) error = cudaStreamWaitEvent(stream_, events_[0], 0);
      if (error != cudaSuccess) cudaStreamSynchronize(wire.stream);
    }
    return error_;
  }
  return "";
}

void CudaFused::encode(int64_t segment) {
  if (!has(Phase::kScatter)) return;
  std::vector<Range> ranges;
  for (int64_t chunk = 0; chunk < rows_.world; ++chunk) {
    if (chunk != spec_.rank) ranges.push_back(range(chunk, segment));
  }
  encode(ranges, spec_.rank, spec_.collective == Collective::kReduceScatter ? 2 : 0);
}

// Encodes ranges, but not the chunk of rank `own` (-1: no such chunk).
void CudaFused::encode(const std::vector<Range>& ranges, int32_t own, int32_t key_step) {
  check(cgx::encode({rows_,
                     spec_.in,
                     spec_.residuals,
                     spec_.keys,
                     {nullptr, own},
                     sent_,
                     /*tails=*/false,
                     key_step,
                     spec_.units},
                    ranges, stream_));
}

// Reduces, adds up or only encodes the chunk that this rank owns.
void CudaFused::reduce(int64_t segment) {
  const std::vector<Range> own = {range(spec_.rank, segment)};
  const RankSource rank{nullptr, spec_.rank};
  switch (spec_.collective) {
    case Collective::kAllReduce:
      check(cgx::reduce(
          {rows_, spec_.in, spec_.keys + 2, rank, received_, spec_.divisor,
           sent_ + spec_.rank * rows_.chunk_bytes, /*tails=*/false, spec_.residuals, spec_.units},
          own, stream_));
      break;
    case Collective::kReduceScatter:
      check(cgx::accumulate(
          {rows_, spec_.in, received_, rows_.world, rank, spec_.divisor, spec_.out}, own, stream_));
      break;
    case Collective::kAllGather:
    case Collective::kGatherSum:
      encode(own, /*own=*/-1, /*key_step=*/0);
  }
}

void CudaFused::decode(int64_t segment) {
  if (!has(Phase::kGather)) return;
  if (spec_.collective == Collective::kGatherSum) {
    // Starts from zeros and adds this rank's payload too, so that all ranks add up the same values.
    check(cgx::accumulate({rows_,
                           {nullptr, spec_.out.dtype},
                           sent_,
                           rows_.world,
                           {nullptr, -1},
                           spec_.divisor,
                           spec_.out},
                          {range(spec_.rank, segment)}, stream_));
    return;
  }
  std::vector<Range> ranges;
  for (int64_t chunk = 0; chunk < rows_.world; ++chunk) ranges.push_back(range(chunk, segment));
  check(cgx::decode({rows_, sent_, spec_.out, spec_.units}, ranges, stream_));
}

void CudaFused::post(Phase phase, int64_t segment) {
  if (!has(phase)) return;
  const int64_t world = rows_.world;
  const int32_t own = spec_.rank;
  const auto [comm, stream] = wire(segment);
  check(cudaEventRecord(events_[0], stream_));
  check(cudaStreamWaitEvent(stream, events_[0], 0));
  if (!error_.empty()) return;  // maybe of the kernel that makes the bytes
  NcclGroup group(nccl_, comm, stream);
  for (int64_t d = 1; d < world; ++d) {
    const int32_t to = static_cast<int32_t>((own + d) % world);
    const int32_t from = static_cast<int32_t>((own + world - d) % world);
    const bool scatter = phase == Phase::kScatter;
    // In the first phase a rank sends each peer the peer's chunk and receives its own. In the
    // second phase it sends its own chunk to all.
    const int32_t out_chunk = scatter ? to : own, in_chunk = scatter ? own : from;
    const size_t out_bytes = segments_.bytes(out_chunk, segment);
    const size_t in_bytes = segments_.bytes(in_chunk, segment);
    if (out_bytes > 0) {
      group.send(place(sent_, out_chunk, out_chunk, segment), out_bytes, to);
    }
    if (in_bytes > 0) {
      group.recv(place(scatter ? received_ : sent_, from, in_chunk, segment), in_bytes, from);
    }
  }
  note(group.end());
  check(cudaEventRecord(event(phase, segment), stream));
}

bool CudaFused::arrived(Phase phase, int64_t segment) {
  if (has(phase)) check(cudaStreamWaitEvent(stream_, event(phase, segment), 0));
  return true;
}

// The segment of a chunk, which starts at an aligned byte of its row.
Range CudaFused::range(int64_t chunk, int64_t segment) const {
  const int64_t from = segments_.begin(chunk, segment);
  const int64_t before = from - rows_.begin[chunk];
  return {from, segments_.begin(chunk, segment + 1),
          aligned(before) + kAlignment * segment - before};
}

uint8_t* CudaFused::place(uint8_t* rows, int64_t row, int64_t chunk, int64_t segment) const {
  const Range r = range(chunk, segment);
  return rows + row * rows_.chunk_bytes + r.from - rows_.begin[chunk] + r.shift;
}

cudaEvent_t CudaFused::event(Phase phase, int64_t segment) const {
  return events_[1 + 2 * segment + (phase == Phase::kGather)];
}

void CudaFused::note(std::string error) {
  if (error_.empty()) error_ = std::move(error);
}

}  // namespace cgx
