// The results of a CPU call, whose memory XLA may just have obtained from the system.
#ifndef CGX_HANDLERS_FRESH_RESULTS_H_
#define CGX_HANDLERS_FRESH_RESULTS_H_

#include "cpu/pages.h"
#include "handlers/operands.h"

namespace cgx {

inline void prefer_huge_pages(const Leaves& results, int64_t batch = 1) {
  for (size_t k = 0; k < results.data.size(); ++k) {
    prefer_huge_pages(results.data[k], batch * results.size[k] * item_size(results.dtype[k]));
  }
}

}  // namespace cgx

#endif  // CGX_HANDLERS_FRESH_RESULTS_H_
