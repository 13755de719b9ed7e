// The kernels over tables of buckets, and their launches.
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "cuda/buckets.h"
#include "cuda/kernels.h"
#include "cuda/steps.h"

namespace cgx {
namespace {

// The number of blocks that a multiprocessor must be able to hold, which bounds the registers of a
// thread. Half of its warps keep enough reads in flight, and a bucket of several tiles has that
// many times the reads.
constexpr int blocks_of(int tiles, bool reduces, bool stochastic, bool residual, bool in_units) {
  if (in_units && !reduces) return residual || stochastic ? 5 : 7;
  if (tiles == 1) return reduces || stochastic || residual ? 8 - 2 * (reduces + residual) : 9;
  return tiles == 0 ? 4 : residual ? 2 : reduces || stochastic ? 3 : 4;
}
constexpr int decode_blocks(bool in_units) { return in_units ? 7 : 8; }
// In a large buffer, a warp works on several buckets and looks up their piece once. If a bucket
// costs little, one block for every four buckets is faster, because memory prefers requests in
// order.
constexpr int kMaxBlocks = 16384, kMaxLightBlocks = 1 << 20;
constexpr int kHeldTiles = 4;  // a bucket of up to 2,048 values is read once

// The number of units of all pieces before the first one for which `beyond` holds.
template <typename Table, typename Beyond>
__device__ int units_before(const Table& table, Beyond beyond) {
  const int p = first_piece(table, beyond);
  return p < table.count ? table.piece[p].before : table.units;
}

__device__ void clear_unit(const Piece& piece, int number) {
  const int words = (number == piece.last ? piece.tail : piece.unit) / 4;
  uint32_t* const to =
      reinterpret_cast<uint32_t*>(piece.out + static_cast<int64_t>(number) * piece.unit);
  for (int i = threadIdx.x % kWarp; i < words; i += kWarp) to[i] = 0;
}

// Does this warp's share of the units [first, end). work(piece, number of the piece) returns a
// function, which is then called with the number of each unit in that piece. So what the units of a
// piece share is computed once.
template <typename Table, typename Work>
__device__ void for_each_unit(const Table& table, int first, int end, Work work) {
  const int warps = gridDim.x * (kThreads / kWarp);
  // All lanes have the same number. The shuffle tells the compiler so, which then computes what
  // depends on the number only once per warp.
  const int warp = __shfl_sync(kEveryLane, static_cast<int>(threadIdx.x) / kWarp, 0);
  int unit = first + static_cast<int>(blockIdx.x) * (kThreads / kWarp) + warp;
  if (unit >= end) return;
  int p = first_piece(table, [&](const Piece& piece) { return piece.before > unit; }) - 1;
  for (; unit < end; ++p) {
    const Piece& piece = table.piece[p];
    if (piece.bits == 0) {
      for (; unit < end && unit - piece.before <= piece.last; unit += warps) {
        clear_unit(piece, unit - piece.before);
      }
    } else if (unit - piece.before <= piece.last) {
      const auto of_unit = work(piece, p);
      for (; unit < end && unit - piece.before <= piece.last; unit += warps) {
        of_unit(unit - piece.before);
      }
    }
  }
}

__device__ int32_t rank_of(RankSource rank) { return rank.device ? *rank.device : rank.value; }

// Clears a record of the rank's own chunk, which nobody reads, and with kResidual its residuals.
template <bool kResidual>
__device__ void clear_record(const Bucket& bucket, uint8_t* record) {
  uint32_t* const words = reinterpret_cast<uint32_t*>(record);
  const int size = static_cast<int>(Record{bucket.values, bucket.bits}.bytes() / 4);
  for (int i = bucket.lane.index; i < size; i += kWarp) words[i] = 0;
  for (int k = 0; kResidual && k < bucket.tiles(); ++k) store_tile<true>(bucket, k, filled(0.0f));
}

template <typename Table, int kTiles, bool kStochastic, bool kResidual>
__global__ void __launch_bounds__(kThreads,
                                  blocks_of(kTiles, false, kStochastic, kResidual, Table::kInUnits))
    encode_kernel(const __grid_constant__ Table table, const EncodeArgs args) {
  const int32_t own = rank_of(args.rank);
  for_each_unit(table, 0, table.units, [&](const Piece& piece, int p) {
    const LeafSeed rotation = Rotation::leaf_seed(piece.number);
    const LeafSeed seed = noise_of<kStochastic>(args.key + piece.chunk * args.key_step, piece);
    // A chunk with its own key is not part of a sum whose ranks spread their noise.
    const float offset =
        kStochastic && args.key_step == 0 ? noise_offset(piece.rounding, own, args.world) : 0.0f;
    return [=, &piece, &table](int number) {
      const Bucket bucket(piece, rotation, number);
      uint8_t* const record = args.payload + bucket.record();
      if (piece.chunk == own) return clear_record<kResidual>(bucket, record);
      const FactorsOf<Table> factors(bucket, table.leaf_units(p));
      encode_values<kTiles, kStochastic, kResidual>(bucket, {seed.bucket(bucket.of_leaf()), offset},
                                                    factors, record);
    };
  });
}

// Whether a record of a peer has a mask.
__device__ bool any_mask(const Bucket& bucket, const uint8_t* records, int64_t stride, int peers,
                         int skip) {
  bool any = false;
  for (int p = bucket.lane.index; p < peers; p += kWarp) {
    if (p != skip) any |= load_header(records + p * stride).mask() != 0;
  }
  return __any_sync(kEveryLane, any);
}

// Reduces the units [first, last). Several tiles leave no registers for masks: with kTiles > 1,
// this leaves out buckets for which a peer sent a mask, and returns whether there are any. With
// kLeftOut, it reduces only those.
template <int kTiles, bool kStochastic, bool kResidual, bool kLeftOut, typename Table>
__device__ bool reduce_units(const Table& table, const ReduceArgs& args, int32_t own, int first,
                             int last) {
  constexpr int kAhead = kTiles == 1 ? 4 : kLeftOut ? 1 : 2;
  const Divide divide(args.divisor);
  bool any = false;
  for_each_unit(table, first, last, [&](const Piece& piece, int p) {
    const LeafSeed rotation = Rotation::leaf_seed(piece.number);
    const LeafSeed seed = noise_of<kStochastic>(args.key, piece);
    return [=, &piece, &table, &any](int number) {
      const Bucket bucket(piece, rotation, number);
      if (kTiles > 1 || kLeftOut) {
        const uint8_t* const records = args.payload + bucket.record();
        const bool masked = any_mask(bucket, records, args.chunk_bytes, args.world, own);
        any |= masked;
        if (masked != kLeftOut) return;
      }
      const FactorsOf<Table> factors(bucket, table.leaf_units(p));
      reduce_records<kTiles, kAhead, kStochastic, kResidual>(
          bucket, {seed.bucket(bucket.of_leaf()), 0.0f}, factors, args.payload, args.chunk_bytes,
          args.world, own, divide, args.divisor, args.chunk + bucket.record());
    };
  });
  return any;
}

template <typename Table, int kTiles, bool kStochastic, bool kResidual>
__global__ void __launch_bounds__(kThreads,
                                  blocks_of(kTiles, true, kStochastic, kResidual, Table::kInUnits))
    reduce_kernel(const __grid_constant__ Table table, const ReduceArgs args) {
  const int32_t own = rank_of(args.rank);
  const int first = units_before(table, [&](const Piece& piece) { return piece.chunk >= own; });
  const int last = units_before(table, [&](const Piece& piece) { return piece.chunk > own; });
  const bool left_out =
      reduce_units<kTiles, kStochastic, kResidual, false>(table, args, own, first, last);
  if constexpr (kTiles > 1) {
    if (left_out) {
      reduce_units<0, kStochastic, kResidual, true>(table, args, own, first, last);
    }
  }
}

template <typename Table>
__global__ void __launch_bounds__(kThreads, decode_blocks(Table::kInUnits))
    decode_kernel(const __grid_constant__ Table table, const DecodeArgs args) {
  for_each_unit(table, 0, table.units, [&](const Piece& piece, int p) {
    const LeafSeed rotation = Rotation::leaf_seed(piece.number);
    return [=, &piece, &table](int number) {
      const Bucket bucket(piece, rotation, number);
      const FactorsOf<Table> factors(bucket, table.leaf_units(p));
      decode_record(bucket, factors, args.payload + bucket.record());
    };
  });
}

__device__ void add_tile(const Tile& other, Tile* t) {
  t->each([&](float& x, int r, int c) { x += other.v[r][c]; });
}

// kFromZeros is a template parameter because a test of piece.in would cost eight instructions per
// bucket.
template <typename Table, bool kFromZeros>
__global__ void __launch_bounds__(kThreads, blocks_of(1, true, false, false, false))
    accumulate_kernel(const __grid_constant__ Table table, const AccumulateArgs args) {
  const int32_t own = rank_of(args.rank);
  const Divide divide(args.divisor);
  for_each_unit(table, 0, table.units, [&](const Piece& piece, int) {
    const LeafSeed rotation = Rotation::leaf_seed(piece.number);
    return [=, &piece](int number) {
      const Bucket bucket(piece, rotation, number);
      const uint8_t* const records = args.payload + bucket.record();
      for (int k = 0; k < bucket.tiles(); ++k) {
        Peers<4> peers(bucket, records, args.row_bytes, args.peers, own, k);
        const auto start = [&] {
          return kFromZeros ? filled(0.0f) : load_tile(bucket, k, Pad::kZero);
        };
        Tile t = filled(0.0f);
        if (!bucket.rotated) t = start();
        peers.add_to(bucket, k, &t);
        if (bucket.rotated) {
          rotate_back(bucket, k, &t);
          if (peers.common_mask() != 0) clear_segments(bucket, k, peers.common_mask(), &t);
          add_tile(start(), &t);
        }
        divide_tile(divide, &t);
        if (any_nan(t)) t.each([&](float& x, int, int) { x = canonical_nan(x); });
        store_tile<false>(bucket, k, t);
      }
    };
  });
}

// Whether the buckets, judged by the first piece, are plain float32, which cost the least.
bool light(const Table& table) {
  return table.piece[0].dtype == DType::kF32 && !table.piece[0].rotated;
}

// The table that a kernel takes, from one of any size.
template <int kPieces>
void copy(const Table& table, const LeafUnits*, TableOf<kPieces>* out) {
  std::copy_n(table.piece, table.count, out->piece);
  out->units = table.units, out->count = table.count, out->tiles = table.tiles;
}
void copy(const Table& table, const LeafUnits* leaves, TableInUnits* out) {
  copy(table, leaves, static_cast<TableOf<kPiecesInUnits>*>(out));
  std::copy_n(leaves, table.count, out->leaves);
}

template <typename Args, typename Own>
cudaError_t launch(void (*kernel)(Own, Args), const Table& table, const LeafUnits* leaves,
                   const Args& args, int32_t units, cudaStream_t stream, int most = kMaxBlocks) {
  if (units == 0) return cudaSuccess;
  constexpr int kWarps = kThreads / kWarp;
  const int blocks = (units + kWarps - 1) / kWarps;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks < most ? blocks : most));
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  if constexpr (std::is_same_v<Own, Table>) {
    return cudaLaunchKernelEx(&config, kernel, table, args);
  } else {
    Own own;
    copy(table, leaves, &own);
    return cudaLaunchKernelEx(&config, kernel, own, args);
  }
}

template <typename Own, int kMostTiles>
struct Kernels {
  using Table = Own;
  static constexpr int kTiles = kMostTiles;

  static constexpr auto encode(bool stochastic, bool residual) {
    return residual     ? stochastic ? encode_kernel<Own, kTiles, true, true>
                                     : encode_kernel<Own, kTiles, false, true>
           : stochastic ? encode_kernel<Own, kTiles, true, false>
                        : encode_kernel<Own, kTiles, false, false>;
  }
  static constexpr auto reduce(bool stochastic, bool residual) {
    return residual     ? stochastic ? reduce_kernel<Own, kTiles, true, true>
                                     : reduce_kernel<Own, kTiles, false, true>
           : stochastic ? reduce_kernel<Own, kTiles, true, false>
                        : reduce_kernel<Own, kTiles, false, false>;
  }
  static constexpr auto decode() { return decode_kernel<Own>; }
  static constexpr auto accumulate(bool from_zeros) {
    return from_zeros ? accumulate_kernel<Own, true> : accumulate_kernel<Own, false>;
  }
};

using Few = TableOf<kFewPieces>;

// Calls f with the Kernels for a table.
template <typename F>
cudaError_t sized(const Table& table, F f) {
  if (table.tiles > kHeldTiles) return f(Kernels<Few, 0>());
  if (table.tiles > 1) return f(Kernels<Few, kHeldTiles>());
  if (table.count > kFewPieces) return f(Kernels<Table, 1>());
  return f(Kernels<Few, 1>());
}
template <typename F>
cudaError_t sized(const Table& table, const LeafUnits* leaves, F f) {
  if (leaves == nullptr) return sized(table, f);
  return table.tiles > 1 ? cudaErrorInvalidValue : f(Kernels<TableInUnits, 1>());
}

}  // namespace

cudaError_t launch_encode(const Table& table, const EncodeArgs& args, TableOptions options,
                          int32_t units, cudaStream_t stream) {
  return sized(table, options.leaves, [&](auto kernels) {
    return launch(kernels.encode(options.stochastic, options.residual), table, options.leaves, args,
                  units, stream,
                  light(table) && !options.stochastic ? kMaxLightBlocks : kMaxBlocks);
  });
}

cudaError_t launch_reduce(const Table& table, const ReduceArgs& args, TableOptions options,
                          int32_t units, cudaStream_t stream) {
  return sized(table, options.leaves, [&](auto kernels) {
    return launch(kernels.reduce(options.stochastic, options.residual), table, options.leaves, args,
                  units, stream);
  });
}

cudaError_t launch_decode(const Table& table, const DecodeArgs& args, TableOptions options,
                          int32_t units, cudaStream_t stream) {
  return sized(table, options.leaves, [&](auto kernels) {
    return launch(kernels.decode(), table, options.leaves, args, units, stream,
                  light(table) ? kMaxLightBlocks : kMaxBlocks);
  });
}

cudaError_t launch_accumulate(const Table& table, const AccumulateArgs& args, bool from_zeros,
                              int32_t units, cudaStream_t stream) {
  return sized(table, [&](auto kernels) {
    return launch(kernels.accumulate(from_zeros), table, nullptr, args, units, stream);
  });
}

cudaError_t load_kernels() {
  cudaError_t error = cudaSuccess;
  const auto load = [&](auto kernel) {
    cudaFuncAttributes unused;
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&unused, kernel);
  };
  const auto load_codec = [&](auto kernels) {
    for (const bool stochastic : {false, true}) {
      for (const bool residual : {false, true}) {
        load(kernels.encode(stochastic, residual));
        load(kernels.reduce(stochastic, residual));
      }
    }
    load(kernels.decode());
  };
  const auto load_sums = [&](auto kernels) {
    load(kernels.accumulate(false));
    load(kernels.accumulate(true));
  };
  load_codec(Kernels<Few, 0>());
  load_codec(Kernels<Few, 1>());
  load_codec(Kernels<Few, kHeldTiles>());
  load_codec(Kernels<Table, 1>());
  load_codec(Kernels<TableInUnits, 1>());
  load_sums(Kernels<Few, 1>());
  load_sums(Kernels<Table, 1>());
  return error;
}

}  // namespace cgx
