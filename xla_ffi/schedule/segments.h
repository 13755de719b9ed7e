// Cuts the chunks of a fusion buffer into the segments that are sent.
#ifndef CGX_SCHEDULE_SEGMENTS_H_
#define CGX_SCHEDULE_SEGMENTS_H_

#include <stdint.h>

#include <algorithm>
#include <vector>

#include "format/wire_format.h"

namespace cgx {

// Cuts every chunk, at record starts, into as many segments as the longest chunk needs.
class Segments {
 public:
  Segments(const Layout& layout, int64_t segment_bytes)
      : count_(std::max<int64_t>(
            1, layout.chunk_bytes / segment_bytes + (layout.chunk_bytes % segment_bytes != 0))) {
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

}  // namespace cgx

#endif  // CGX_SCHEDULE_SEGMENTS_H_
