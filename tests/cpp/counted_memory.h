// Counts the memory that operator new gives out; included by one source of a program.
#ifndef CGX_TESTS_COUNTED_MEMORY_H_
#define CGX_TESTS_COUNTED_MEMORY_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>

namespace {

// The bytes that operator new has given out and not got back, and their peak, so that a test can
// bound the memory of a call. Each block begins with its size.
std::atomic<int64_t> live{0}, peak{0};

void* give(size_t bytes, size_t alignment) {
  alignment = std::max(alignment, sizeof(std::max_align_t));
  const size_t whole = (bytes + 2 * alignment - 1) / alignment * alignment;
  char* const block = static_cast<char*>(std::aligned_alloc(alignment, whole));
  if (!block) throw std::bad_alloc();
  std::memcpy(block, &bytes, sizeof(bytes));
  const int64_t now = live += bytes;
  for (int64_t seen = peak; seen < now && !peak.compare_exchange_weak(seen, now);) {
  }
  return block + alignment;
}

void take_back(void* data, size_t alignment) {
  if (!data) return;
  char* const block = static_cast<char*>(data) - std::max(alignment, sizeof(std::max_align_t));
  size_t bytes;
  std::memcpy(&bytes, block, sizeof(bytes));
  live -= bytes;
  std::free(block);
}

}  // namespace

void* operator new(size_t bytes) { return give(bytes, 1); }
void* operator new(size_t bytes, std::align_val_t alignment) {
  return give(bytes, static_cast<size_t>(alignment));
}
void operator delete(void* data) noexcept { take_back(data, 1); }
void operator delete(void* data, size_t) noexcept { take_back(data, 1); }
void operator delete(void* data, std::align_val_t alignment) noexcept {
  take_back(data, static_cast<size_t>(alignment));
}
void operator delete(void* data, size_t, std::align_val_t alignment) noexcept {
  take_back(data, static_cast<size_t>(alignment));
}

#endif  // CGX_TESTS_COUNTED_MEMORY_H_
