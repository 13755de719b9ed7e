// Splits a fusion buffer into runs of buckets that a kernel can process without further lookups.
#ifndef CGX_FORMAT_RUNS_H_
#define CGX_FORMAT_RUNS_H_

#include <stdint.h>

#include "format/quantize.h"
#include "format/wire_format.h"

namespace cgx {
inline namespace CGX_ISA {

// Consecutive buckets [first, last) of one slot whose records lie in one chunk. The record of
// `first` starts at `offset` in the payload.
struct Run {
  int64_t leaf;
  const Slot& slot;
  int64_t first, last;
  int64_t chunk, offset;

  CGX_HD int64_t first_value() const { return first * slot.bucket_size; }
  CGX_HD int64_t values() const {
    const int64_t end = last * slot.bucket_size;
    return (end < slot.size ? end : slot.size) - first_value();
  }
  CGX_HD int64_t bytes() const {
    return (last < slot.buckets() ? slot.record_start(last) : slot.end()) -
           slot.record_start(first);
  }
};

template <typename F>
CGX_HD void for_each_run(const Layout& layout, int64_t from, int64_t to, F f) {
  for (int64_t s = layout.slot_at(from); s < layout.num_slots && layout.slots[s].start < to; ++s) {
    const Slot& slot = layout.slots[s];
    const int64_t last = slot.first_bucket_from(to);
    for (int64_t first = slot.first_bucket_from(from); first < last;) {
      const int64_t start = slot.record_start(first), chunk = layout.chunk_of(start);
      const int64_t cut = slot.first_bucket_from(layout.begin[chunk + 1]);
      const Run run{
          s, slot, first, cut < last ? cut : last, chunk, layout.payload_offset(chunk, start)};
      f(run);
      first = run.last;
    }
  }
}

}  // namespace CGX_ISA
}  // namespace cgx

#endif  // CGX_FORMAT_RUNS_H_
