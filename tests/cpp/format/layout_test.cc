// Layouts: the chunks of large buffers, and specifications that are refused.
#include "format/layout.h"

#include "cases.h"
#include "schedule/segments.h"

namespace {

void layouts() {
  for (int64_t world : {1, 2, 3, 7, 64, 1000}) {
    cgx::OwnedLayout owned;
    check(owned
              .build({{(int64_t{1} << 33) + 5, 3, 512, 0, 0}, {0, 8, 32, 0, 1}, {7, 4, 64, 0, 2}},
                     world)
              .empty(),
          "layout of 2^33 values");
    const cgx::Layout layout = owned.view();
    bool rising = layout.begin[0] == 0;
    for (int64_t w = 0; w < world; ++w) rising &= layout.chunk_size(w) >= 0;
    check(rising, "chunks in order");
    check(layout.chunk_bytes <= layout.total_bytes() / world + 201, "chunks of equal length");
  }
  cgx::OwnedLayout owned;
  check(!owned.build({{5, 0, 32, 0, 0}}, 1).empty(), "bits 0 refused");
  check(!owned.build({{5, 9, 32, 0, 0}}, 1).empty(), "bits 9 refused");
  check(!owned.build({{5, 4, 33, 0, 0}}, 1).empty(), "bucket 33 refused");
  check(!owned.build({{5, 4, 32, 0, 0}}, 0).empty(), "world 0 refused");
  check(!owned.build({{-1, 4, 32, 0, 0}}, 1).empty(), "negative size refused");
  for (const int64_t segment : {32, 35, 37, 50, 512, 10000}) {
    check(owned.build({{5, 4, 512, 0, 0, 0, segment}}, 1).empty(),
          "segment " + std::to_string(segment));
  }
  for (const int64_t segment :
       {int64_t{-1}, int64_t{1}, int64_t{31}, int64_t{34}, cgx::kMaxSize + 1}) {
    check(!owned.build({{5, 4, 512, 0, 0, 0, segment}}, 1).empty(),
          "segment " + std::to_string(segment) + " refused");
  }
  check(owned.build({{5, 4, 32, 0, 0, 0, 2}}, 1).empty(), "segment 2 of a bucket of 32");
  check(owned.build({{5, 4, 512, 0, 0, 1}, {5, 4, 64, 0, 0}}, 1).empty(), "no segment");
  check(owned.view().slots[0].segment == 32 && owned.view().slots[1].segment == 4,
        "a 16th of a bucket");
  const std::vector<cgx::SlotSpec> huge(1 << 15, {cgx::kMaxSize, 8, 32, 0, 0});
  check(owned.build(huge, 2).find("2^48 values") != std::string::npos,
        "leaves whose bytes overflow 64 bits refused");
  const std::vector<cgx::SlotSpec> large{{cgx::kMaxRow, 8, 512, 0, 0}};
  check(owned.build(large, 1).find("less than 2^33") != std::string::npos, "a long row refused");
  check(owned.build(large, 2).empty(), "rows of half its length");
}

void segments() {
  cgx::OwnedLayout owned;
  check(owned.build({{1000, 4, 64, 0, 0}}, 2).empty(), "layout");
  for (const int64_t bytes : {int64_t{1} << 20, INT64_MAX - 1, INT64_MAX}) {
    check(cgx::Segments(owned.view(), bytes).count() == 1,
          "one segment of at most " + std::to_string(bytes) + " bytes");
  }
}

}  // namespace

int main() {
  layouts();
  segments();
  return report();
}
