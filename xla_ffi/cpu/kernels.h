// Encode, reduce, decode and accumulate over a fusion buffer in host memory. No XLA here: raw
// pointers in, raw pointers out, one batch element per call.
#ifndef CGX_CPU_KERNELS_H_
#define CGX_CPU_KERNELS_H_

#include <stdint.h>

#include "format/codes.h"
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

// Those of the codes that are not part of the wire format: signs, levels, and the largest values.
// Only fp32 values.
struct CodeKernels {
  // Sets bit i of `out` if x[i] >= 0, for n values. The last byte is padded with zero bits.
  void (*pack_signs)(const float* x, int64_t n, uint8_t* out);
  // Writes 1 or -1 for every bit. `large` results are written past the caches.
  void (*unpack_signs)(const uint8_t* from, int64_t n, bool large, float* out);
  // Finds the places in [from, to) where the magnitude of x has at least these bits, in order.
  // Stops once it has found more than `room` places. Returns how many it has found. `at` and
  // `taken` receive places and values, and have room + kSlack entries.
  int64_t (*collect)(const float* x, int64_t from, int64_t to, uint32_t bits, int64_t room,
                     int32_t* at, float* taken);
  // Encodes the values [from, to), which must be whole buckets and fill whole bytes, or end at n.
  void (*encode_buckets)(const BucketsCall& call, int64_t from, int64_t to);
  // Selects the `keep` largest magnitudes of each of the buckets [from, to) of x[n]. The last
  // bucket is padded with zeros. `at` receives places in the bucket, in order, and `taken` the
  // values. Both have `keep` entries per bucket and start at bucket 0.
  void (*largest_of_buckets)(const float* x, int64_t n, int64_t bucket_size, int64_t keep,
                             int64_t from, int64_t to, int32_t* at, float* taken);
};

constexpr int64_t kSlack = 64;

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

// Whether subnormals are kept, as IEEE 754 requires, or treated as zeros, as XLA's own threads do.
enum class Subnormals { kKept, kZeros };

// Sets the thread's floating-point mode, whatever it was, to round to nearest even. Restores it on
// exit.
class ScopedArithmetic {
 public:
  explicit ScopedArithmetic(Subnormals subnormals);
  ~ScopedArithmetic();
  ScopedArithmetic(const ScopedArithmetic&) = delete;
  ScopedArithmetic& operator=(const ScopedArithmetic&) = delete;

 private:
  uint64_t saved_;
};

}  // namespace cgx

#endif  // CGX_CPU_KERNELS_H_
