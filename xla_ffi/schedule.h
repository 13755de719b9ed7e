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
// Without one of its phases it is a reduce-scatter or an all-gather.
#ifndef CGX_SCHEDULE_H_
#define CGX_SCHEDULE_H_

#include <stdint.h>

#include <algorithm>
#include <vector>

#include "wire_format.h"

namespace cgx {

enum class Phase { kScatter, kGather };

// Every chunk cut at record starts into as many segments as the longest chunk needs.
class Segments {
 public:
  Segments(const Layout& layout, int64_t segment_bytes)
      : count_(std::max<int64_t>(1, (layout.chunk_bytes + segment_bytes - 1) / segment_bytes)) {
    for (int64_t chunk = 0; chunk < layout.world; ++chunk) {
      for (int64_t s = 0; s < count_; ++s) {
        const int64_t cut = chunk_cut(s, layout.chunk_size(chunk), count_);
        cuts_.push_back(
            std::min(layout.record_from(layout.begin[chunk] + cut), layout.begin[chunk + 1]));
      }
      cuts_.push_back(layout.begin[chunk + 1]);
    }
  }
  int64_t count() const { return count_; }
  // Position in the fusion buffer of the segment's first record; `segment` may be count().
  int64_t begin(int64_t chunk, int64_t segment) const {
    return cuts_[chunk * (count_ + 1) + segment];
  }
  int64_t bytes(int64_t chunk, int64_t segment) const {
    return begin(chunk, segment + 1) - begin(chunk, segment);
  }

 private:
  int64_t count_;
  std::vector<int64_t> cuts_;
};

template <typename Kernels, typename Transport>
class Schedule {
 public:
  // At most `window` segments (2 or more) are encoded and not yet reduced.
  Schedule(int64_t segments, int64_t window, Kernels& kernels, Transport& transport)
      : segments_(segments), window_(window), kernels_(kernels), transport_(transport) {}

  bool done() const { return decoded_ == segments_; }

  // Takes one step; false when every step that is left waits for the transport.
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

#endif  // CGX_SCHEDULE_H_
