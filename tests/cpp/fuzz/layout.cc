// Layouts built from any numbers must be refused, or all arithmetic on them must hold.
#include "format/layout.h"

#include <algorithm>
#include <vector>

#include "format/runs.h"
#include "fuzz/fuzz.h"
#include "schedule/segments.h"

namespace fuzz {
namespace {

void check(bool ok, const char* what) {
  if (!ok) fail(std::string("layout: ") + what);
}

void check_layout(Random& random, const cgx::Layout& layout) {
  const int64_t total = layout.total_bytes();
  check(layout.begin[0] == 0 && total >= 0, "it starts at 0");
  for (int64_t w = 0; w < layout.world; ++w) {
    const int64_t size = layout.chunk_size(w);
    check(size >= 0 && size <= layout.chunk_bytes, "chunks in order, none longer than a row");
  }
  for (int k = 0; k < 8; ++k) {
    const int64_t position = random.below(total + 1), slot = layout.slot_at(position);
    const int64_t record = layout.record_from(position), chunk = layout.chunk_of(position);
    check(slot >= 0 && slot <= layout.num_slots, "a slot at every position");
    check(record >= position && record <= total, "records from there on");
    check(layout.payload_offset(chunk, position) >= 0, "a place in the payload");
    if (slot == layout.num_slots) continue;
    const cgx::Slot& own = layout.slots[slot];
    const int64_t bucket = own.first_bucket_from(position);
    check(bucket >= 0 && bucket <= own.buckets(), "a bucket from there on");
  }
  int64_t values = 0, bytes = 0;
  cgx::for_each_run(layout, 0, total, [&](const cgx::Run& run) {
    values += run.values();
    bytes += run.bytes();
  });
  check(values == layout.values && bytes == total, "runs make up the whole");
  // No more segments than fit in memory.
  const int64_t least = layout.chunk_bytes / (1000 / std::min<int64_t>(layout.world, 1000)) + 1;
  const cgx::Segments segments(layout, std::max(least, random.hostile()));
  const int64_t chunk = random.below(layout.world);
  bytes = 0;
  for (int64_t s = 0; s < segments.count(); ++s) {
    check(segments.bytes(chunk, s) >= 0, "segments in order");
    bytes += segments.bytes(chunk, s);
  }
  check(bytes == layout.chunk_size(chunk), "segments make up the chunk");
}

}  // namespace

void layout_case(Random& random) {
  std::vector<cgx::SlotSpec> specs;
  // Absurd numbers, or those within the limits.
  const bool hostile = random.chance(2);
  for (int64_t k = random.below(6); k > 0; --k) {
    const int64_t bucket = cgx::kTailValues * random.within(1, 1 << random.below(26));
    cgx::SlotSpec own{random.chance(2) ? random.size(100'000) : random.below(cgx::kMaxRow / 8),
                      random.within(1, 8),
                      bucket,
                      random.below(3),
                      random.below(10),
                      random.below(2),
                      random.chance(2) ? random.within(bucket / 15 + 1, cgx::kMaxSize) : 0};
    int64_t* const numbers[] = {&own.size,   &own.bits,     &own.bucket_size, &own.rounding,
                                &own.number, &own.rotation, &own.segment};
    if (hostile) *numbers[random.below(7)] = random.hostile();
    specs.push_back(own);
  }
  int64_t world = random.chance(16) ? random.within(1, 3000) : random.within(1, 9);
  if (hostile && random.chance(4)) world = random.chance(64) ? random.hostile() : -random.size(99);
  cgx::OwnedLayout owned;
  const std::string error = owned.build(specs, world);
  count("layout", !error.empty());
  if (error.empty()) {
    check_layout(random, owned.view());
  } else {
    check(hostile, error.c_str());
  }
}

}  // namespace fuzz
