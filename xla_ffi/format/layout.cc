#include "format/layout.h"

#include <algorithm>

namespace cgx {
namespace {

std::string outside(const char* what, size_t leaf, int64_t value, const std::string& limit) {
  return std::string(what) + " of leaf " + std::to_string(leaf) + " is " + std::to_string(value) +
         ", must be " + limit;
}

std::string check(const LeafSpec& leaf, size_t k) {
  if (leaf.size < 0 || leaf.size > kMaxSize) return outside("size", k, leaf.size, "in [0, 2^48]");
  if (leaf.bits < 1 || leaf.bits > kMaxBits) return outside("bits", k, leaf.bits, "in [1, 8]");
  if (leaf.bucket_size < kTailValues || leaf.bucket_size > kMaxBucket ||
      leaf.bucket_size % kTailValues != 0) {
    return outside("bucket_size", k, leaf.bucket_size, "a multiple of 32 in [32, 2^30]");
  }
  if (leaf.rounding < 0 || leaf.rounding > 2) {
    return outside("rounding", k, leaf.rounding, "0, 1 or 2");
  }
  if (leaf.rotation < 0 || leaf.rotation > 1) {
    return outside("rotation", k, leaf.rotation, "0 or 1");
  }
  if (leaf.units < 0 || leaf.units > 1) return outside("units", k, leaf.units, "0 or 1");
  if (leaf.stream < 0 || leaf.stream > int64_t{UINT32_MAX}) {
    return outside("stream", k, leaf.stream, "in [0, 2^32)");
  }
  return "";
}

}  // namespace

std::string OwnedLayout::build(const std::vector<LeafSpec>& leaves, int64_t world) {
  if (world < 1 || world > kMaxWorld) {
    return "world is " + std::to_string(world) + ", must be in [1, 2^20]";
  }
  slots_.clear();
  values_ = longest_bucket_ = longest_staged_bucket_ = 0;
  int64_t total = 0;
  for (size_t k = 0; k < leaves.size(); ++k) {
    const LeafSpec& leaf = leaves[k];
    if (std::string error = check(leaf, k); !error.empty()) return error;
    const Slot slot{leaf.size,
                    leaf.bucket_size,
                    static_cast<int32_t>(leaf.bits),
                    static_cast<Rounding>(leaf.rounding),
                    leaf.rotation != 0,
                    static_cast<uint32_t>(leaf.stream),
                    total};
    slots_.push_back(slot);
    total = slot.end();
    values_ += leaf.size;
    const int64_t longest = kRows * slot.record(0).columns();
    longest_bucket_ = std::max(longest_bucket_, longest);
    if (slot.rotated || leaf.units)
      longest_staged_bucket_ = std::max(longest_staged_bucket_, longest);
  }
  begin_.assign(world + 1, total);
  begin_[0] = 0;
  const Layout whole{slots_.data(), static_cast<int64_t>(slots_.size()), begin_.data(), world, 0,
                     values_};
  for (int64_t w = 1; w < world; ++w) begin_[w] = whole.record_from(chunk_cut(w, total, world));
  chunk_bytes_ = 0;
  for (int64_t w = 0; w < world; ++w)
    chunk_bytes_ = std::max(chunk_bytes_, begin_[w + 1] - begin_[w]);
  return "";
}

Layout OwnedLayout::view() const {
  return {slots_.data(), static_cast<int64_t>(slots_.size()),
          begin_.data(), static_cast<int64_t>(begin_.size()) - 1,
          chunk_bytes_,  values_};
}

}  // namespace cgx
