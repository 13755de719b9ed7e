// Huge pages for memory that malloc has just mapped, whose first writer pays for every page.
#ifndef CGX_CPU_PAGES_H_
#define CGX_CPU_PAGES_H_

#include <stdint.h>

#if defined(__linux__)
#include <errno.h>
#include <sys/mman.h>
#endif

namespace cgx {

// Asks for huge pages where `data` has no memory yet, which makes page faults 512 times fewer.
inline void prefer_huge_pages(void* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHuge = 2 << 20;
  const uintptr_t from = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (from + kHuge - 1) / kHuge * kHuge;
  const uintptr_t end = (from + static_cast<uintptr_t>(bytes)) / kHuge * kHuge;
  if (end <= begin) return;
  const int kept = errno;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // no more than advice
  errno = kept;
#else
  static_cast<void>(data), static_cast<void>(bytes);
#endif
}

}  // namespace cgx

#endif  // CGX_CPU_PAGES_H_
