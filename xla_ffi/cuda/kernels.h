// CUDA kernels over tables of buckets. A launch gets its table by value in its parameters, so that
// a CUDA graph can hold it. Apart from the values, only keys, ranks and payloads are read from
// device memory. No XLA here, so that nvcc never sees its headers.
#ifndef CGX_CUDA_KERNELS_H_
#define CGX_CUDA_KERNELS_H_

#include <cuda_runtime_api.h>
#include <stdint.h>

#include "format/leaves.h"
#include "format/wire_format.h"

namespace cgx {

// Consecutive buckets of one leaf within one chunk, or bytes to clear. The fields that a warp reads
// for every bucket are 32 bits wide where the limits of a bucket or a table allow it.
struct Piece {
  const char* in;   // the first bucket's values; null in decode, and for zeros in accumulate
  char* out;        // where its residuals, values or sums go, or the bytes to clear; null: nowhere
  int64_t record;   // the first record, in the payload; in reduce and accumulate, in a row of it
  int64_t bucket;   // number of the first bucket in its leaf
  int32_t before;   // units of the pieces before this one in the table
  int32_t last;     // number of its last unit
  int32_t unit;     // values per bucket; bytes per unit when cleared
  int32_t tail;     // the same for the last unit
  uint32_t number;  // of the leaf: feeds its noise and its rotation's signs
  int32_t chunk;
  uint64_t segment : 49;  // as in Slot
  uint64_t bits : 4;      // 0: clear bytes, a multiple of 4 of them
  DType dtype : 2;        // of the leaf
  Rounding rounding : 2;
  bool aligned : 1;  // four values may be read or written at once
  bool rotated : 1;

  // Bytes from a record to the next.
  CGX_HD uint32_t stride() const {
    return kHeaderBytes + static_cast<uint32_t>(bits) * (static_cast<uint32_t>(unit) / kRows);
  }
};
static_assert(sizeof(Piece) == 64, "its last fields share a word");

// A launch copies all of its parameters, so a table comes in two sizes: 4 KB, and 32,764 bytes, the
// limit of CUDA 12.1 and later.
constexpr int kFewPieces = 56, kManyPieces = 510;
constexpr int kClearedUnit = 512;  // bytes that a warp clears at once
// A table's units are counted in 32 bits, with room for what a grid adds to the last one. The tests
// cannot run so many units and set their own limit.
#if !defined(CGX_TABLE_UNITS)
#define CGX_TABLE_UNITS (1 << 30)
#endif
constexpr int64_t kTableUnits = CGX_TABLE_UNITS;

template <int kPieces>
struct TableOf {
  static constexpr bool kInUnits = false;
  Piece piece[kPieces];
  int32_t units;  // of all pieces
  int32_t count;
  int32_t tiles;  // of the longest bucket

  // The units of a piece's leaf.
  CGX_HD const LeafUnits* leaf_units(int) const { return nullptr; }
};
using Table = TableOf<kManyPieces>;
// The kernels for leaves with units have one size of table, and buckets of one tile.
constexpr int kPiecesInUnits = 338;
struct TableInUnits : TableOf<kPiecesInUnits> {
  static constexpr bool kInUnits = true;
  LeafUnits leaves[kPiecesInUnits];  // the units of each piece's leaf

  CGX_HD const LeafUnits* leaf_units(int p) const { return &leaves[p]; }
};
static_assert(sizeof(TableOf<kFewPieces>) <= 4000 && sizeof(Table) <= 32668 &&
                  sizeof(TableInUnits) <= 32668,
              "a table and a kernel's arguments are its parameters");

constexpr int64_t kTileValues = 512;
// The most pieces that a launch takes. Kernels for longer buckets take the longest to compile, so
// they come only in the small size.
constexpr int most_pieces(int64_t longest_bucket, bool in_units) {
  if (in_units) return kPiecesInUnits;
  return longest_bucket <= kTileValues ? kManyPieces : kFewPieces;
}

// A rank: the address where an SPMD program has it, or the number itself.
struct RankSource {
  const int32_t* device;  // null: the rank is `value`
  int32_t value;
};

struct EncodeArgs {
  uint8_t* payload;     // u8[world, chunk_bytes]
  const uint32_t* key;  // device, two words
  int32_t key_step;     // words from one chunk's key to the next; 0: one key for all
  RankSource rank;      // the chunk that is cleared instead; -1: none
  int32_t world;
};

struct ReduceArgs {
  const uint8_t* payload;  // u8[world, chunk_bytes]
  uint8_t* chunk;          // u8[chunk_bytes]
  int64_t chunk_bytes;
  int32_t world;
  const uint32_t* key;
  RankSource rank;  // whose chunk is reduced: pieces of other chunks are left alone
  float divisor;
};

struct DecodeArgs {
  const uint8_t* payload;  // u8[world, chunk_bytes]
};

struct AccumulateArgs {
  const uint8_t* payload;  // u8[peers, row_bytes]
  int64_t row_bytes;
  int32_t peers;
  RankSource rank;  // the row that is skipped; -1: none
  float divisor;
};

// What the pieces of a table have in common.
struct TableOptions {
  const LeafUnits* leaves;  // the units of each piece's leaf; null: no leaf has any
  bool stochastic = false, residual = false;
};

// Each function starts one kernel with work for at most `units` warps. reduce_kernel works on the
// pieces of one chunk, so pieces must be in the order of their chunks.
cudaError_t launch_encode(const Table& table, const EncodeArgs& args, TableOptions options,
                          int32_t units, cudaStream_t stream);
cudaError_t launch_reduce(const Table& table, const ReduceArgs& args, TableOptions options,
                          int32_t units, cudaStream_t stream);
cudaError_t launch_decode(const Table& table, const DecodeArgs& args, TableOptions options,
                          int32_t units, cudaStream_t stream);
cudaError_t launch_accumulate(const Table& table, const AccumulateArgs& args, bool from_zeros,
                              int32_t units, cudaStream_t stream);

// Loads every kernel on the current device. Otherwise a kernel is loaded at its first launch, which
// may wait for all work on the device.
cudaError_t load_kernels();

}  // namespace cgx

#endif  // CGX_CUDA_KERNELS_H_
