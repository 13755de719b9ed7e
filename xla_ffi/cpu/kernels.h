// Encode, reduce, decode and accumulate over a fusion buffer in host memory. No XLA here: raw
// pointers in, raw pointers out, one batch element per call.
#ifndef CGX_CPU_KERNELS_H_
#define CGX_CPU_KERNELS_H_

#include <stdint.h>

#include "cpu/codes.h"
#include "format/leaves.h"
#include "format/wire_format.h"

namespace cgx {

// A call over more values than this does not fit in a last-level cache. Its results are written
// past the caches, so that the processor does not read the lines that it is about to overwrite.
constexpr int64_t kNontemporalValues = 8 << 20;

// Every call below works on the records that start in [from, to) of the buffer, so calls on
// disjoint ranges may run at once. zero_tails clears the bytes past a chunk's end. `scratch` has
// room for twice the longest bucket's values in whole columns; calls that run at once need separate
// scratch. `units` (null: none) has one entry per leaf.

// Writes u8[world, chunk_bytes]. The row of chunk `rank` is zeros (-1: no such row). `residuals`
// (data null: none) receives x - decode(encode(x)) at the scale of the leaf's values, and zeros in
// the rank's own chunk.
struct EncodeCall {
  Layout layout;
  LeavesIn leaves;
  LeavesOut residuals;
  const uint32_t* key;  // two words
  int64_t rank;
  uint8_t* payload;
  float* scratch;
  const LeafUnits* units = nullptr;
};

// Writes u8[chunk_bytes]: the encoded (own exact values + decoded rows of the peers) / divisor.
// `residuals` (data null: none) receives, in the rank's own chunk, the error of that encoding times
// divisor. The owner must add this to its values so that the next sum makes up for the error.
struct ReduceCall {
  Layout layout;
  LeavesIn leaves;
  const uint32_t* key;
  int64_t rank;
  const uint8_t* payload;  // u8[world, chunk_bytes]
  float divisor;
  uint8_t* chunk;
  float* scratch;
  LeavesOut residuals;
  const LeafUnits* units = nullptr;
};

struct DecodeCall {
  Layout layout;
  const uint8_t* payload;  // u8[world, chunk_bytes]
  LeavesOut leaves;
  float* scratch;
  const LeafUnits* units = nullptr;
};

// Writes (leaf + decoded payloads of all peers except `rank`) / divisor, in the dtype of the
// leaves. Without leaves (data null) it adds up only the payloads.
struct AccumulateCall {
  Layout layout;  // world 1
  LeavesIn leaves;
  const uint8_t* payload;  // u8[peers, total_bytes]
  int64_t peers;
  int64_t rank;
  float divisor;
  LeavesOut sums;
  float* scratch;
};

// One instruction set's build of the kernels.
struct KernelTable {
  const char* isa;
  void (*encode)(const EncodeCall&, int64_t from, int64_t to);
  void (*reduce)(const ReduceCall&, int64_t from, int64_t to);
  void (*decode)(const DecodeCall&, int64_t from, int64_t to);
  void (*accumulate)(const AccumulateCall&, int64_t from, int64_t to);
  const CodeKernels& codes;
};

// The builds that are compiled in and supported by this processor, best first; null ends the list.
const KernelTable* const* available_kernels();
const KernelTable& current_kernels();
// Chooses the build that later calls use. Returns false if it is not available.
bool select_kernels(const char* isa);

// Zeroes the bytes past each chunk's end in u8[world, chunk_bytes].
void zero_tails(const Layout& layout, uint8_t* payload);

// Sets the thread's floating-point mode, whatever it was, to round to nearest even. Restores it on
// exit.
class ScopedArithmetic {
 public:
  ~ScopedArithmetic();
  ScopedArithmetic(const ScopedArithmetic&) = delete;
  ScopedArithmetic& operator=(const ScopedArithmetic&) = delete;

 protected:
  explicit ScopedArithmetic(bool subnormals);

 private:
  uint64_t saved_;
};

// Keeps subnormals, as IEEE 754 requires.
class ScopedIeee : public ScopedArithmetic {
 public:
  ScopedIeee() : ScopedArithmetic(true) {}
};

// Treats subnormals as zeros, as XLA's own threads do.
class ScopedXla : public ScopedArithmetic {
 public:
  ScopedXla() : ScopedArithmetic(false) {}
};

}  // namespace cgx

#endif  // CGX_CPU_KERNELS_H_
