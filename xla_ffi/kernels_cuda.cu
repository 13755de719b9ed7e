// One warp works on one bucket at a time. It sees the bucket as the wire format does, 8 rows of
// columns, in tiles of 64 columns: the lower half of the warp holds rows 0 to 3, the upper half
// rows 4 to 7, every lane 4 rows by 4 columns. So values are read and written 16 bytes a lane (8
// for 16-bit dtypes), a lane's codes of a column make the low or the high half of the column's
// number, and its bytes of a plane make one 32-bit word. Only at odd widths do the two halves meet
// in one byte.
//
// Ranges and codes come from the functions that the CPU kernels use, so the bytes are the same;
// compile with -fmad=false. No shared memory: what lanes tell each other goes through registers.
#include <cuda_runtime.h>

#include "kernels_cuda.h"
#include "quantize.h"
#include "wire_format.h"

namespace cgx {
namespace {

constexpr int kWarp = 32;
constexpr unsigned kEveryLane = 0xffffffffu;
constexpr int kThreads = 256;
// Blocks that a multiprocessor shall hold, which bounds the registers of a thread: half of its
// warps keep enough reads in flight, and a bucket of several tiles brings that many reads more by
// itself.
constexpr int blocks_of(int tiles, bool more_registers = false) {
  return tiles == 1 ? (more_registers ? 3 : 4) : tiles == 0 ? 2 : 1;
}
constexpr int64_t kMaxBlocks = 1 << 20;
constexpr int kHalfRows = kRows / 2;
constexpr int kColumns = 4;  // of a lane
constexpr int kTileColumns = kWarp / 2 * kColumns;
constexpr int kHeldTiles = 4;  // a bucket of up to 2,048 values is read once
static_assert(kTileValues == kRows * kTileColumns, "the header tells what a tile holds");

struct Lane {
  int index;
  int half;  // 0: rows 0 to 3, 1: rows 4 to 7
  int column;

  __device__ Lane()
      : index(threadIdx.x % kWarp),
        half(index / (kWarp / 2)),
        column(index % (kWarp / 2) * kColumns) {}
};

// A lane's part of a tile.
struct Tile {
  float v[kHalfRows][kColumns];
};

// A bucket as a lane sees it. It has 2^30 values at most, so places in it are 32-bit.
struct Bucket {
  int values;
  int columns;
  int bits;
  DType dtype;
  bool aligned;
  Lane lane;

  __device__ Bucket(const Piece& piece, int64_t number)
      : bits(piece.bits), dtype(piece.dtype), aligned(piece.aligned) {
    const int64_t rest = piece.values - number * piece.unit;
    values = rest < piece.unit ? static_cast<int>(rest) : piece.unit;
    columns = static_cast<int>(Record{values, bits}.columns());
  }
  __device__ int tiles() const { return (columns + kTileColumns - 1) / kTileColumns; }
  __device__ int column(int tile) const { return tile * kTileColumns + lane.column; }
  // Index in the bucket of the first of this lane's values in row r of its half.
  __device__ int index(int tile, int r) const {
    return (lane.half * kHalfRows + r) * columns + column(tile);
  }
  // Whether some of its rows end early: only a leaf's last bucket.
  __device__ bool ragged() const { return values != kRows * columns; }
};

__device__ float load_item(const char* values, int i, DType dtype) {
  if (dtype == DType::kF32) return reinterpret_cast<const float*>(values)[i];
  const uint32_t half = reinterpret_cast<const uint16_t*>(values)[i];
  return dtype == DType::kBF16 ? widen_bf16<float>(half) : widen_f16<float>(half);
}

__device__ uint32_t narrow(float x, DType dtype) {
  return dtype == DType::kBF16 ? narrow_bf16<float>(x) : narrow_f16<float>(x);
}

__device__ void store_item(char* values, int i, DType dtype, float x) {
  if (dtype == DType::kF32) {
    reinterpret_cast<float*>(values)[i] = x;
  } else {
    reinterpret_cast<uint16_t*>(values)[i] = static_cast<uint16_t>(narrow(x, dtype));
  }
}

// Reads this lane's part; values that do not exist are `pad`.
__device__ Tile load_tile(const Bucket& bucket, const char* values, int tile, float pad) {
  Tile t;
  const bool here = bucket.column(tile) < bucket.columns;
  if (here && bucket.aligned && !bucket.ragged()) {
    if (bucket.dtype == DType::kF32) {
#pragma unroll
      for (int r = 0; r < kHalfRows; ++r) {
        const float4 x = *reinterpret_cast<const float4*>(reinterpret_cast<const float*>(values) +
                                                          bucket.index(tile, r));
        t.v[r][0] = x.x, t.v[r][1] = x.y, t.v[r][2] = x.z, t.v[r][3] = x.w;
      }
      return t;
    }
    uint2 x[kHalfRows];
#pragma unroll
    for (int r = 0; r < kHalfRows; ++r) {
      x[r] = *reinterpret_cast<const uint2*>(reinterpret_cast<const uint16_t*>(values) +
                                             bucket.index(tile, r));
    }
#pragma unroll
    for (int r = 0; r < kHalfRows; ++r) {
      const uint32_t item[kColumns] = {x[r].x & 0xffffu, x[r].x >> 16, x[r].y & 0xffffu,
                                       x[r].y >> 16};
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        t.v[r][c] =
            bucket.dtype == DType::kBF16 ? widen_bf16<float>(item[c]) : widen_f16<float>(item[c]);
      }
    }
    return t;
  }
#pragma unroll
  for (int r = 0; r < kHalfRows; ++r) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int i = bucket.index(tile, r) + c;
      t.v[r][c] = here && i < bucket.values ? load_item(values, i, bucket.dtype) : pad;
    }
  }
  return t;
}

__device__ void store_tile(const Bucket& bucket, char* values, int tile, const Tile& t) {
  if (bucket.column(tile) >= bucket.columns) return;
  if (!bucket.aligned || bucket.ragged()) {
#pragma unroll
    for (int r = 0; r < kHalfRows; ++r) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const int i = bucket.index(tile, r) + c;
        if (i < bucket.values) store_item(values, i, bucket.dtype, t.v[r][c]);
      }
    }
    return;
  }
#pragma unroll
  for (int r = 0; r < kHalfRows; ++r) {
    const int i = bucket.index(tile, r);
    if (bucket.dtype == DType::kF32) {
      *reinterpret_cast<float4*>(reinterpret_cast<float*>(values) + i) =
          make_float4(t.v[r][0], t.v[r][1], t.v[r][2], t.v[r][3]);
    } else {
      uint32_t item[kColumns];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) item[c] = narrow(t.v[r][c], bucket.dtype);
      *reinterpret_cast<uint2*>(reinterpret_cast<uint16_t*>(values) + i) =
          make_uint2(item[0] | item[1] << 16, item[2] | item[3] << 16);
    }
  }
}

// Bytes of four words, transposed: byte k of word j becomes byte j of word k.
__device__ void transpose_bytes(uint32_t (&w)[kColumns]) {
  const uint32_t low01 = __byte_perm(w[0], w[1], 0x5140), low23 = __byte_perm(w[2], w[3], 0x5140);
  const uint32_t high01 = __byte_perm(w[0], w[1], 0x7362), high23 = __byte_perm(w[2], w[3], 0x7362);
  w[0] = __byte_perm(low01, low23, 0x5410);
  w[1] = __byte_perm(low01, low23, 0x7632);
  w[2] = __byte_perm(high01, high23, 0x5410);
  w[3] = __byte_perm(high01, high23, 0x7632);
}

// The planes that a half's bits lie in. At an odd width the halves share the middle one.
struct Planes {
  int first, last;
  int shift;  // where the half's first bit lies in its first plane

  __device__ Planes(int bits, int half)
      : first(half ? bits / 2 : 0),
        last(half ? bits : (bits + 1) / 2),
        shift(half * (bits & 1) * 4) {}
};

// A lane's codes: for each of its columns the number that its four rows make.
struct Codes {
  uint32_t number[kColumns] = {};

  __device__ void set(int r, int c, int bits, uint32_t code) { number[c] |= code << (r * bits); }
  __device__ uint32_t get(int r, int c, int bits) const {
    return number[c] >> (r * bits) & ((1u << bits) - 1u);
  }
};

__device__ void store_codes(const Bucket& bucket, uint8_t* planes, int tile, Codes codes) {
  const Planes mine(bucket.bits, bucket.lane.half);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) codes.number[c] <<= mine.shift;
  transpose_bytes(codes.number);
  const bool odd = bucket.bits & 1;
  const uint32_t shared = __shfl_xor_sync(kEveryLane, codes.number[0], kWarp / 2);
  if (bucket.column(tile) >= bucket.columns) return;
#pragma unroll
  for (int k = 0; k < kColumns; ++k) {
    const int plane = mine.first + k;
    const bool middle = odd && plane == bucket.bits / 2;  // the lower half stores it
    if (plane >= mine.last || (middle && bucket.lane.half)) continue;
    *reinterpret_cast<uint32_t*>(planes + plane * bucket.columns + bucket.column(tile)) =
        middle ? codes.number[k] | shared : codes.number[k];
  }
}

// Records start at multiples of 4 bytes, not of 8.
__device__ Meta load_meta(const uint8_t* record) {
  const float* const words = reinterpret_cast<const float*>(record);
  return {words[0], words[1]};
}

// What a lane reads of a record's tile: its bytes of each plane, as they lie.
struct Encoded {
  Meta meta;
  uint32_t word[kColumns] = {};

  __device__ Encoded(const Bucket& bucket, const uint8_t* record, int tile)
      : meta(load_meta(record)) {
    const Planes mine(bucket.bits, bucket.lane.half);
    const uint8_t* const planes = Record::planes(record) + bucket.column(tile);
    if (bucket.column(tile) >= bucket.columns) return;
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
      const int plane = mine.first + k;
      if (plane >= mine.last) break;
      word[k] = *reinterpret_cast<const uint32_t*>(planes + plane * bucket.columns);
    }
  }
  __device__ Codes codes(const Bucket& bucket) const {
    const Planes mine(bucket.bits, bucket.lane.half);
    Codes codes;
#pragma unroll
    for (int k = 0; k < kColumns; ++k) codes.number[k] = word[k];
    transpose_bytes(codes.number);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) codes.number[c] >>= mine.shift;
    return codes;
  }
};

__device__ void store_meta(const Lane& lane, uint8_t* record, Meta meta) {
  if (lane.index < 2)
    reinterpret_cast<float*>(record)[lane.index] = lane.index ? meta.unit : meta.lo;
}

// Floats in the order of signed integers, for the warp's integer reductions; its own inverse.
__device__ int32_t ordered(float x) {
  const int32_t bits = bit_cast<int32_t>(x);
  return bits ^ (bits >> 31 & 0x7fffffff);
}
__device__ float unordered(int32_t x) { return bit_cast<float>(x ^ (x >> 31 & 0x7fffffff)); }

// The extremes of the values that a lane has seen.
struct Range {
  float min = bit_cast<float>(0x7f800000u), max = bit_cast<float>(0xff800000u);
  uint32_t magnitude = 0;  // the largest, as bits: exponents of 255 stand out

  __device__ void add(const Tile& t) {
#pragma unroll
    for (int r = 0; r < kHalfRows; ++r) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        min = fminf(min, t.v[r][c]);
        max = fmaxf(max, t.v[r][c]);
        const uint32_t bits = bit_cast<uint32_t>(t.v[r][c]) & 0x7fffffffu;
        magnitude = bits > magnitude ? bits : magnitude;
      }
    }
  }
  // The bucket's meta, from all lanes.
  __device__ Meta meta(int bits) const {
    const float lo = unordered(__reduce_min_sync(kEveryLane, ordered(min)));
    const float hi = unordered(__reduce_max_sync(kEveryLane, ordered(max)));
    const bool finite = __all_sync(kEveryLane, magnitude < 0x7f800000u);
    return make_meta(lo, hi, finite, bits);
  }
};

// Encodes a tile of a bucket. With kResidual `t` becomes what is lost.
template <bool kStochastic, bool kResidual>
__device__ void encode_tile(const Bucket& bucket, Meta meta, NoiseSeed seed, int tile,
                            uint8_t* record, Tile* t) {
  const float inverse = inverse_unit(meta);
  Codes codes;
#pragma unroll
  for (int r = 0; r < kHalfRows; ++r) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      float& x = t->v[r][c];
      const int i = bucket.index(tile, r) + c;
      uint32_t code;
      if (kStochastic) {
        const float rounding = noise<float>(static_cast<uint32_t>(i), seed);
        code = stochastic_code(x, meta.lo, inverse, rounding, bucket.bits);
      } else {
        code = nearest_code(x, meta.lo, inverse);
      }
      if (poisoned(meta) || (bucket.ragged() && i >= bucket.values)) code = 0;
      codes.set(r, c, bucket.bits, code);
      if (kResidual) x = canonical_nan(x - decode<float>(code, meta));
    }
  }
  store_codes(bucket, Record::planes(record), tile, codes);
}

// Finds a bucket's range and encodes it. `values(tile)` gives a tile, pads within the range; it is
// called once for each tile where kTiles says how many there are at most (0: any number, twice).
// What is lost goes to `residual`, with kResidual.
template <int kTiles, bool kStochastic, bool kResidual, typename Values>
__device__ void encode_bucket(const Bucket& bucket, NoiseSeed seed, uint8_t* record, Values values,
                              char* residual) {
  Range range;
  Tile held[kTiles ? kTiles : 1];
  if (kTiles) {
#pragma unroll
    for (int k = 0; k < kTiles; ++k) {
      if (k < bucket.tiles()) range.add(held[k] = values(k));
    }
  } else {
    for (int k = 0; k < bucket.tiles(); ++k) range.add(values(k));
  }
  const Meta meta = range.meta(bucket.bits);
  store_meta(bucket.lane, record, meta);
  if (kTiles) {
#pragma unroll
    for (int k = 0; k < kTiles; ++k) {
      if (k >= bucket.tiles()) break;
      encode_tile<kStochastic, kResidual>(bucket, meta, seed, k, record, &held[k]);
      if (kResidual) store_tile(bucket, residual, k, held[k]);
    }
  } else {
    for (int k = 0; k < bucket.tiles(); ++k) {
      Tile t = values(k);
      encode_tile<kStochastic, kResidual>(bucket, meta, seed, k, record, &t);
      if (kResidual) store_tile(bucket, residual, k, t);
    }
  }
}

// x / divisor. A power of two is multiplied by its inverse: the same bits, many times faster.
struct Divide {
  float by;
  bool multiply;

  CGX_HD explicit Divide(float divisor) : by(divisor), multiply(false) {
    const uint32_t bits = bit_cast<uint32_t>(divisor), exponent = bits >> 23 & 255u;
    if ((bits & 0x7fffffu) == 0 && exponent > 0 && exponent < 254) {
      multiply = true;
      by = 1.0f / divisor;
    }
  }
  __device__ float operator()(float x) const { return multiply ? x * by : x / by; }
};

// (own values + decoded records of the peers, in order, without `skip`) / divisor.
__device__ Tile sum_tile(const Bucket& bucket, const char* own, const uint8_t* records,
                         int64_t peer_stride, int peers, int skip, Divide divide, int tile) {
  Tile t = load_tile(bucket, own, tile, 0.0f);
  // The next peer's record is asked for before this one's is decoded: memory is far, and a warp
  // that waited for every peer in turn would leave it idle.
  const auto after = [&](int peer) { return peer + 1 == skip ? peer + 2 : peer + 1; };
  int peer = after(-1);
  if (peer < peers) {
    Encoded now(bucket, records + peer * peer_stride, tile);
#pragma unroll 1
    while (peer < peers) {
      peer = after(peer);
      Encoded ahead = now;
      if (peer < peers) ahead = Encoded(bucket, records + peer * peer_stride, tile);
      const Codes codes = now.codes(bucket);
#pragma unroll
      for (int r = 0; r < kHalfRows; ++r) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          t.v[r][c] += decode<float>(codes.get(r, c, bucket.bits), now.meta);
        }
      }
      now = ahead;
    }
  }
#pragma unroll
  for (int r = 0; r < kHalfRows; ++r) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) t.v[r][c] = canonical_nan(divide(t.v[r][c]));
  }
  return t;
}

// The values that a range is found from: those that do not exist repeat the bucket's first.
__device__ Tile without_pads(const Bucket& bucket, int tile, Tile t, float first) {
  const bool here = bucket.column(tile) < bucket.columns;
  if (here && !bucket.ragged()) return t;
#pragma unroll
  for (int r = 0; r < kHalfRows; ++r) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if (!here || bucket.index(tile, r) + c >= bucket.values) t.v[r][c] = first;
    }
  }
  return t;
}

__device__ int64_t units_of(const Piece& piece) {
  return (piece.values + piece.unit - 1) / piece.unit;
}

// The first piece of the table for which `beyond` holds; `count` when there is none.
template <typename Beyond>
__device__ int first_piece(const Table& table, Beyond beyond) {
  int low = 0, high = table.count;
  while (low < high) {
    const int mid = (low + high) / 2;
    if (beyond(table.piece[mid])) {
      high = mid;
    } else {
      low = mid + 1;
    }
  }
  return low;
}

// Calls f(piece, number of the unit in it) for this warp's share of the pieces [first, last).
template <typename F>
__device__ void for_each_unit(const Table& table, int first, int last, F f) {
  if (first == last) return;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (blockDim.x / kWarp);
  const int64_t warp =
      static_cast<int64_t>(blockIdx.x) * (blockDim.x / kWarp) + threadIdx.x / kWarp;
  const Piece& final = table.piece[last - 1];
  const int64_t end = final.before + units_of(final);
  for (int64_t unit = table.piece[first].before + warp; unit < end; unit += warps) {
    const int p = first_piece(table, [&](const Piece& piece) { return piece.before > unit; }) - 1;
    f(table.piece[p], unit - table.piece[p].before);
  }
}

__device__ void clear_unit(const Piece& piece, int64_t number) {
  const int64_t rest = piece.values - number * piece.unit;
  const int64_t bytes = rest < piece.unit ? rest : piece.unit;
  uint32_t* const to = reinterpret_cast<uint32_t*>(piece.out + number * piece.unit);
  for (int64_t i = threadIdx.x % kWarp; i < bytes / 4; i += kWarp) to[i] = 0;
}

__device__ int32_t rank_of(RankSource rank) { return rank.device ? *rank.device : rank.value; }

__device__ int64_t record_bytes(const Piece& piece) {
  return Record{piece.unit, piece.bits}.bytes();
}

__device__ int64_t item_bytes(const Piece& piece) { return piece.unit * item_size(piece.dtype); }

template <int kTiles, bool kStochastic, bool kResidual>
__global__ void __launch_bounds__(kThreads, blocks_of(kTiles, kResidual))
    encode_kernel(const __grid_constant__ Table table, const EncodeArgs args) {
  const int32_t own = rank_of(args.rank);
  for_each_unit(table, 0, table.count, [&](const Piece& piece, int64_t number) {
    if (piece.bits == 0) return clear_unit(piece, number);
    const Bucket bucket(piece, number);
    const char* const in = piece.in + number * item_bytes(piece);
    char* const residual = kResidual ? piece.out + number * item_bytes(piece) : nullptr;
    uint8_t* const record =
        args.payload + piece.chunk * args.chunk_bytes + piece.record + number * record_bytes(piece);
    if (piece.chunk == own) {
      uint32_t* const words = reinterpret_cast<uint32_t*>(record);
      const int64_t size = Record{bucket.values, bucket.bits}.bytes() / 4;
      for (int64_t i = bucket.lane.index; i < size; i += kWarp) words[i] = 0;
      for (int k = 0; kResidual && k < bucket.tiles(); ++k) {
        store_tile(bucket, residual, k, Tile{});
      }
      return;
    }
    const NoiseSeed seed =
        kStochastic ? noise_seed(args.key, piece.stream, piece.bucket + number) : NoiseSeed{};
    const float first = load_item(in, 0, bucket.dtype);
    encode_bucket<kTiles, kStochastic, kResidual>(
        bucket, seed, record, [&](int k) { return load_tile(bucket, in, k, first); }, residual);
  });
}

template <int kTiles, bool kStochastic>
__global__ void __launch_bounds__(kThreads, blocks_of(kTiles, true))
    reduce_kernel(const __grid_constant__ Table table, const ReduceArgs args) {
  const int32_t own = rank_of(args.rank);
  const Divide divide(args.divisor);
  const int first = first_piece(table, [&](const Piece& piece) { return piece.chunk >= own; });
  const int last = first_piece(table, [&](const Piece& piece) { return piece.chunk > own; });
  for_each_unit(table, first, last, [&](const Piece& piece, int64_t number) {
    if (piece.bits == 0) return clear_unit(piece, number);
    const Bucket bucket(piece, number);
    const char* const in = piece.in + number * item_bytes(piece);
    const int64_t record = piece.record + number * record_bytes(piece);
    const NoiseSeed seed =
        kStochastic ? noise_seed(args.key, piece.stream, piece.bucket + number) : NoiseSeed{};
    const auto sum = [&](int k) {
      return sum_tile(bucket, in, args.payload + record, args.chunk_bytes, args.world, own, divide,
                      k);
    };
    // The first value of the bucket is lane 0's in tile 0; every lane with pads needs it.
    float pad = 0.0f;
    encode_bucket<kTiles, kStochastic, false>(
        bucket, seed, args.chunk + record,
        [&](int k) {
          const Tile t = sum(k);
          if (k == 0) pad = __shfl_sync(kEveryLane, t.v[0][0], 0);
          return without_pads(bucket, k, t, pad);
        },
        nullptr);
  });
}

__global__ void __launch_bounds__(kThreads, blocks_of(1))
    decode_kernel(const __grid_constant__ Table table, const DecodeArgs args) {
  for_each_unit(table, 0, table.count, [&](const Piece& piece, int64_t number) {
    const Bucket bucket(piece, number);
    char* const out = piece.out + number * item_bytes(piece);
    const uint8_t* const record =
        args.payload + piece.chunk * args.chunk_bytes + piece.record + number * record_bytes(piece);
    for (int k = 0; k < bucket.tiles(); ++k) {
      const Encoded encoded(bucket, record, k);
      const Codes codes = encoded.codes(bucket);
      Tile t;
#pragma unroll
      for (int r = 0; r < kHalfRows; ++r) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          t.v[r][c] = decode<float>(codes.get(r, c, bucket.bits), encoded.meta);
        }
      }
      store_tile(bucket, out, k, t);
    }
  });
}

__global__ void __launch_bounds__(kThreads, blocks_of(0))
    accumulate_kernel(const __grid_constant__ Table table, const AccumulateArgs args) {
  const int32_t own = rank_of(args.rank);
  const Divide divide(args.divisor);
  for_each_unit(table, 0, table.count, [&](const Piece& piece, int64_t number) {
    const Bucket bucket(piece, number);
    const char* const in = piece.in + number * item_bytes(piece);
    char* const out = piece.out + number * item_bytes(piece);
    const uint8_t* const records = args.payload + piece.record + number * record_bytes(piece);
    for (int k = 0; k < bucket.tiles(); ++k) {
      store_tile(bucket, out, k,
                 sum_tile(bucket, in, records, args.row_bytes, args.peers, own, divide, k));
    }
  });
}

template <typename Args>
cudaError_t launch(void (*kernel)(Table, Args), const Table& table, const Args& args, int64_t units,
                   cudaStream_t stream) {
  if (units == 0) return cudaSuccess;
  constexpr int64_t kWarps = kThreads / kWarp;
  const int64_t blocks = (units + kWarps - 1) / kWarps;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks < kMaxBlocks ? blocks : kMaxBlocks));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, table, args);
}

template <int kTiles>
cudaError_t launch_encode_of(const Table& table, const EncodeArgs& args, bool stochastic,
                             bool residual, int64_t units, cudaStream_t stream) {
  const auto kernel =
      residual ? stochastic ? encode_kernel<kTiles, true, true> : encode_kernel<kTiles, false, true>
      : stochastic ? encode_kernel<kTiles, true, false>
                   : encode_kernel<kTiles, false, false>;
  return launch(kernel, table, args, units, stream);
}

template <int kTiles>
cudaError_t launch_reduce_of(const Table& table, const ReduceArgs& args, bool stochastic,
                             int64_t units, cudaStream_t stream) {
  const auto kernel = stochastic ? reduce_kernel<kTiles, true> : reduce_kernel<kTiles, false>;
  return launch(kernel, table, args, units, stream);
}

}  // namespace

cudaError_t launch_encode(const Table& table, const EncodeArgs& args, bool stochastic,
                          bool residual, int64_t units, cudaStream_t stream) {
  const auto launch_of = table.tiles <= 1            ? launch_encode_of<1>
                         : table.tiles <= kHeldTiles ? launch_encode_of<kHeldTiles>
                                                     : launch_encode_of<0>;
  return launch_of(table, args, stochastic, residual, units, stream);
}

cudaError_t launch_reduce(const Table& table, const ReduceArgs& args, bool stochastic,
                          int64_t units, cudaStream_t stream) {
  const auto launch_of = table.tiles <= 1            ? launch_reduce_of<1>
                         : table.tiles <= kHeldTiles ? launch_reduce_of<kHeldTiles>
                                                     : launch_reduce_of<0>;
  return launch_of(table, args, stochastic, units, stream);
}

cudaError_t launch_decode(const Table& table, const DecodeArgs& args, int64_t units,
                          cudaStream_t stream) {
  return launch(decode_kernel, table, args, units, stream);
}

cudaError_t launch_accumulate(const Table& table, const AccumulateArgs& args, int64_t units,
                              cudaStream_t stream) {
  return launch(accumulate_kernel, table, args, units, stream);
}

}  // namespace cgx
