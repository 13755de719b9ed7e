#include "format/layout.h"

#include <algorithm>

namespace cgx {
namespace {

std::string outside(const char* what, size_t leaf, int64_t value, const std::string& limit) {
  return std::string(what) + " of leaf " + std::to_string(leaf) + " is " + std::to_string(value) +
         ", must be " + limit;
}

int64_t segment_of(const SlotSpec& spec) {
  return spec.segment ? spec.segment : spec.bucket_size / kMaskBits;
}

// The largest number of segments that a bucket meets.
int64_t most_segments(const SlotSpec& spec) {
  const int64_t segment = segment_of(spec);
  if (spec.bucket_size % segment == 0) return spec.bucket_size / segment;
  return (spec.bucket_size - 2) / segment + 2;
}

std::string check(const SlotSpec& spec, size_t k) {
  if (spec.size < 0 || spec.size > kMaxSize) return outside("size", k, spec.size, "in [0, 2^48]");
  if (spec.bits < 1 || spec.bits > kMaxBits) return outside("bits", k, spec.bits, "in [1, 8]");
  if (spec.bucket_size < kTailValues || spec.bucket_size > kMaxBucket ||
      spec.bucket_size % kTailValues != 0) {
    return outside("bucket_size", k, spec.bucket_size, "a multiple of 32 in [32, 2^30]");
  }
  if (spec.rounding < 0 || spec.rounding > 2) {
    return outside("rounding", k, spec.rounding, "0, 1 or 2");
  }
  if (spec.segment < 0 || spec.segment > kMaxSize || most_segments(spec) > kMaskBits) {
    return outside("segment", k, spec.segment,
                   "such that no bucket of " + std::to_string(spec.bucket_size) +
                       " values meets more than 16 segments, and at most 2^48");
  }
  if (spec.rotation < 0 || spec.rotation > 1) {
    return outside("rotation", k, spec.rotation, "0 or 1");
  }
  if (spec.number < 0 || spec.number > int64_t{UINT32_MAX}) {
    return outside("number", k, spec.number, "in [0, 2^32)");
  }
  return "";
}

}  // namespace

std::string OwnedLayout::build(const std::vector<SlotSpec>& specs, int64_t world) {
  if (world < 1 || world > kMaxWorld) {
    return "world is " + std::to_string(world) + ", must be in [1, 2^20]";
  }
  slots_.clear();
  values_ = scratch_values_ = 0;
  int64_t total = 0;
  for (size_t k = 0; k < specs.size(); ++k) {
    const SlotSpec& spec = specs[k];
    if (std::string error = check(spec, k); !error.empty()) return error;
    if (spec.size > kMaxSize - values_) {
      return "leaves 0 to " + std::to_string(k) + " have more than 2^48 values; split the buffer";
    }
    const Slot slot{spec.size,
                    spec.bucket_size,
                    static_cast<int32_t>(spec.bits),
                    static_cast<Rounding>(spec.rounding),
                    spec.rotation != 0,
                    segment_of(spec),
                    static_cast<uint32_t>(spec.number),
                    total};
    slots_.push_back(slot);
    total = slot.end();
    values_ += spec.size;
    // For a bucket's sum, and for the values of a peer that are added to it.
    scratch_values_ = std::max(scratch_values_, 2 * kRows * slot.record(0).columns());
  }
  begin_.assign(world + 1, total);
  begin_[0] = 0;
  const Layout whole{slots_.data(), static_cast<int64_t>(slots_.size()), begin_.data(), world, 0,
                     values_};
  for (int64_t w = 1; w < world; ++w) begin_[w] = whole.record_from(chunk_cut(w, total, world));
  chunk_bytes_ = 0;
  for (int64_t w = 0; w < world; ++w)
    chunk_bytes_ = std::max(chunk_bytes_, begin_[w + 1] - begin_[w]);
  if (chunk_bytes_ >= kMaxRow) {
    return "the payload for a rank is " + std::to_string(chunk_bytes_) +
           " bytes, must be less than 2^33; split the buffer";
  }
  return "";
}

Layout OwnedLayout::view() const {
  return {slots_.data(), static_cast<int64_t>(slots_.size()),
          begin_.data(), static_cast<int64_t>(begin_.size()) - 1,
          chunk_bytes_,  values_};
}

}  // namespace cgx
