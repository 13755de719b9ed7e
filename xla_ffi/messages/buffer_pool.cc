#include "messages/buffer_pool.h"

#include <algorithm>
#include <new>
#include <utility>

#include "cpu/pages.h"

namespace cgx {
namespace {

constexpr std::align_val_t kAlignment{64};
constexpr size_t kKept = 16;  // buffers kept for later calls

}  // namespace

void BufferPool::Free::operator()(uint8_t* p) const { operator delete(p, kAlignment); }

BufferPool::Buffer BufferPool::take(int64_t bytes) {
  auto best = free_.end();
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    if (it->bytes >= bytes && it->bytes / 2 <= bytes &&
        (best == free_.end() || it->bytes < best->bytes)) {
      best = it;
    }
  }
  if (best == free_.end()) {
    auto* const fresh =
        static_cast<uint8_t*>(operator new(std::max<int64_t>(bytes, 1), kAlignment));
    prefer_huge_pages(fresh, bytes);
    return {std::unique_ptr<uint8_t, Free>(fresh), bytes};
  }
  Buffer found = std::move(*best);
  free_.erase(best);
  return found;
}

void BufferPool::give_back(Buffer buffer) {
  if (free_.size() == kKept) free_.erase(free_.begin());
  free_.push_back(std::move(buffer));
}

}  // namespace cgx
