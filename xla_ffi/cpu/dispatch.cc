#include <string.h>

#include <atomic>

#include "cpu/kernels.h"

namespace cgx {

#if defined(__x86_64__)
namespace baseline {
extern const KernelTable kTable;
}
#if !defined(CGX_BASELINE_ONLY)
namespace avx2 {
extern const KernelTable kTable;
}
namespace avx512 {
extern const KernelTable kTable;
}
#endif
#elif defined(__aarch64__)
namespace neon {
extern const KernelTable kTable;
}
#else
#error "cgx_jax supports x86-64 and aarch64"
#endif

namespace {

// Best first. Null ends the list.
struct Available {
  const KernelTable* tables[4] = {};
  Available() {
    int n = 0;
#if defined(__x86_64__)
#if !defined(CGX_BASELINE_ONLY)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
      tables[n++] = &avx512::kTable;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
      tables[n++] = &avx2::kTable;
    }
#endif
    tables[n++] = &baseline::kTable;
#else
    tables[n++] = &neon::kTable;
#endif
  }
};

std::atomic<const KernelTable*> chosen{nullptr};

}  // namespace

const KernelTable* const* available_kernels() {
  static const Available available;
  return available.tables;
}

const KernelTable& current_kernels() {
  const KernelTable* table = chosen.load(std::memory_order_relaxed);
  return table ? *table : **available_kernels();
}

bool select_kernels(const char* isa) {
  for (const KernelTable* const* table = available_kernels(); *table; ++table) {
    if (strcmp((*table)->isa, isa) == 0) {
      chosen.store(*table, std::memory_order_relaxed);
      return true;
    }
  }
  return false;
}

void zero_tails(const Layout& layout, uint8_t* payload) {
  for (int64_t w = 0; w < layout.world; ++w) {
    const int64_t used = layout.chunk_size(w);
    memset(payload + w * layout.chunk_bytes + used, 0, layout.chunk_bytes - used);
  }
}

#if defined(__x86_64__)
ScopedArithmetic::ScopedArithmetic(Subnormals subnormals) : saved_(__builtin_ia32_stmxcsr()) {
  // The second with flush-to-zero and denormals-are-zeros.
  __builtin_ia32_ldmxcsr(subnormals == Subnormals::kKept ? 0x1f80 : 0x9fc0);
}
ScopedArithmetic::~ScopedArithmetic() { __builtin_ia32_ldmxcsr(static_cast<unsigned>(saved_)); }
#else
ScopedArithmetic::ScopedArithmetic(Subnormals subnormals) {
  __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
  __asm__ volatile("msr fpcr, %0"
                   :
                   : "r"(subnormals == Subnormals::kKept ? uint64_t{0} : uint64_t{1} << 24));
}
ScopedArithmetic::~ScopedArithmetic() { __asm__ volatile("msr fpcr, %0" : : "r"(saved_)); }
#endif

}  // namespace cgx
