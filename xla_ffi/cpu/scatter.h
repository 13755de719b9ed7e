// Adds up sparse values that several ranks have sent.
#ifndef CGX_CPU_SCATTER_H_
#define CGX_CPU_SCATTER_H_

#include <stdint.h>

#include <algorithm>

#include "cpu/parallel.h"

namespace cgx {

// Zeroes `out`, then adds taken[i] to out[at[i]] for each i in order. Places outside [0, n) are
// ignored.
//
// Each thread owns a range of places and looks at all pairs. So the order of additions at a place
// is the order of the pairs, on any number of threads.
template <typename Pool>
void scatter_sum(Pool& pool, const int32_t* at, const float* taken, int64_t count, float* out,
                 int64_t n) {
  split_range(pool, 1, 0, n, std::min(pieces(n), workers(pool, pieces(n))),
              [&](int64_t, int64_t from, int64_t to, int64_t) {
                std::fill(out + from, out + to, 0.0f);
                float* const own = out + from;
                const uint64_t size = to - from;
                for (int64_t i = 0; i < count; ++i) {
                  const uint64_t place = static_cast<uint64_t>(at[i] - from);
                  if (place < size) own[place] += taken[i];
                }
              });
}

}  // namespace cgx

#endif  // CGX_CPU_SCATTER_H_
