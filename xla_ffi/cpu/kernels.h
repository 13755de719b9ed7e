// Encode, reduce, decode and accumulate over a fusion buffer in host memory. No XLA here: raw
// pointers in, raw pointers out, one batch element a call.
#ifndef CGX_CPU_KERNELS_H_
#define CGX_CPU_KERNELS_H_

#include <stdint.h>

#include "cpu/codes.h"
#include "format/leaves.h"
#include "format/wire_format.h"

namespace cgx {

// A call over more values than this does not fit a last-level cache: its results go past the
// caches, which spares the processor from reading the lines that it is about to overwrite.
constexpr int64_t kNontemporalValues = 8 << 20;

// Every call below works on the records that start in [from, to) of the buffer, so that calls on
// disjoint ranges may run at once. Bytes past a chunk's end are zero_tails' work. `scratch` holds
// the longest bucket's values in whole columns; calls that run at once need their own. Reduce needs
// it always, the others only for slots that are rotated or have units. `units` (null: none) has one
// entry per leaf.

// Writes u8[world, chunk_bytes]; the row of chunk `rank` is zeros (-1: no such row). `residuals`
// (data null: none) receives x - decode(encode(x)), zeros in the own chunk; both in the leaf's
// units.
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
// `residuals` (data null: none) receives in the own chunk what that encoding lost, times divisor:
// what the owner must add to its values for the next sum to make it good.
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

// Writes (leaf + decoded payloads of all peers but `rank`) / divisor, in the dtype of both. Without
// leaves (data null) it adds up the payloads alone.
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

// Builds compiled in and supported by this processor, best first, ended by null.
const KernelTable* const* available_kernels();
const KernelTable& current_kernels();
// Chooses the build that later calls use; false when it is not available.
bool select_kernels(const char* isa);

// Zeroes the bytes past each chunk's end in u8[world, chunk_bytes].
void zero_tails(const Layout& layout, uint8_t* payload);

// Arithmetic whatever the thread had set, rounding to nearest even; restores on exit.
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

// Subnormals are kept, as IEEE 754 has it.
class ScopedIeee : public ScopedArithmetic {
 public:
  ScopedIeee() : ScopedArithmetic(true) {}
};

// Subnormals are zeros, as on XLA's own threads.
class ScopedXla : public ScopedArithmetic {
 public:
  ScopedXla() : ScopedArithmetic(false) {}
};

}  // namespace cgx

#endif  // CGX_CPU_KERNELS_H_
