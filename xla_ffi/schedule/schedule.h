// Scatter-reduce-allgather over segments: the order of steps, once for every transport.
//
//   encode   E0 E1    E2    E3
//   scatter     ==S0== ==S1== ==S2== ...
//   reduce            R0    R1    R2
//   gather                ==G0== ==G1== ...
//   decode                      D0    D1
//
// Segment s + 1 is encoded while s is on the wire and s - 1 is being reduced. The schedule knows
// neither compressor nor transport; both are types with a few functions:
//
//   Kernels:    encode(s), reduce(s), decode(s)
//   Transport:  post(phase, s)     this rank's part of segment s is ready to travel
//               arrived(phase, s)  the other ranks' parts of segment s are here
//
// Without one of its phases, the schedule runs one of the other collectives. Kernels and transport
// then do nothing for the phase that is left out.
#ifndef CGX_SCHEDULE_SCHEDULE_H_
#define CGX_SCHEDULE_SCHEDULE_H_

#include <stdint.h>

#include <algorithm>

namespace cgx {

enum class Phase { kScatter, kGather };

// An all-reduce has both phases. A reduce-scatter leaves out the second phase: it adds up values
// instead of encoding their sum. The other two leave out the first phase and encode values instead
// of a sum. An all-gather then decodes these values; a gather-sum adds up what all ranks encoded.
enum class Collective { kAllReduce, kReduceScatter, kAllGather, kGatherSum };

constexpr bool has(Collective collective, Phase phase) {
  return collective == Collective::kAllReduce ||
         (phase == Phase::kScatter) == (collective == Collective::kReduceScatter);
}

template <typename Kernels, typename Transport>
class Schedule {
 public:
  // At most `window` segments (2 or more) are encoded and not yet reduced.
  Schedule(int64_t segments, int64_t window, Kernels& kernels, Transport& transport)
      : segments_(segments), window_(window), kernels_(kernels), transport_(transport) {}

  bool done() const { return decoded_ == segments_; }

  // Takes one step. Returns false if every remaining step waits for the transport.
  bool step() {
    if (follows(decoded_, reduced_) && transport_.arrived(Phase::kGather, decoded_)) {
      kernels_.decode(decoded_++);
      return true;
    }
    if (follows(reduced_, encoded_) && transport_.arrived(Phase::kScatter, reduced_)) {
      kernels_.reduce(reduced_);
      transport_.post(Phase::kGather, reduced_++);
      return true;
    }
    if (encoded_ < segments_ && encoded_ < reduced_ + window_) {
      kernels_.encode(encoded_);
      transport_.post(Phase::kScatter, encoded_++);
      return true;
    }
    return false;
  }

 private:
  // A stage stays one segment behind the one before it, so that on a transport that never says
  // "not yet" (a stream, which waits by itself) the steps still overlap.
  bool follows(int64_t stage, int64_t before) const {
    return stage < before && before >= std::min(stage + 2, segments_);
  }

  const int64_t segments_, window_;
  int64_t encoded_ = 0, reduced_ = 0, decoded_ = 0;
  Kernels& kernels_;
  Transport& transport_;
};

}  // namespace cgx

#endif  // CGX_SCHEDULE_SCHEDULE_H_
