// The kernels over tables of buckets, and their launches.
#include <cuda_runtime.h>

#include "buckets_cuda.h"
#include "kernels_cuda.h"

namespace cgx {
namespace {

constexpr int kThreads = 256;
// Blocks that a multiprocessor shall hold, which bounds the registers of a thread: half of its
// warps keep enough reads in flight, and a bucket of several tiles brings that many reads more by
// itself.
constexpr int blocks_of(int tiles, int more_registers = 0) {
  return tiles == 1 ? 4 - more_registers : tiles == 0 ? 2 : 1;
}
constexpr int64_t kMaxBlocks = 1 << 20;
constexpr int kHeldTiles = 4;  // a bucket of up to 2,048 values is read once

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

// Units of the pieces before that one.
template <typename Beyond>
__device__ int64_t units_before(const Table& table, Beyond beyond) {
  const int p = first_piece(table, beyond);
  return p < table.count ? table.piece[p].before : table.units;
}

// Calls f(piece, number of the unit in it) for this warp's share of the units [first, end).
template <typename F>
__device__ void for_each_unit(const Table& table, int64_t first, int64_t end, F f) {
  const unsigned warps = gridDim.x * (blockDim.x / kWarp);
  const unsigned warp = blockIdx.x * (blockDim.x / kWarp) + threadIdx.x / kWarp;
  for (int64_t unit = first + warp; unit < end; unit += warps) {
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

template <int kTiles, bool kStochastic, bool kResidual>
__global__ void __launch_bounds__(kThreads, blocks_of(kTiles, kResidual))
    encode_kernel(const __grid_constant__ Table table, const EncodeArgs args) {
  const int32_t own = rank_of(args.rank);
  for_each_unit(table, 0, table.units, [&](const Piece& piece, int64_t number) {
    if (piece.bits == 0) return clear_unit(piece, number);
    const Bucket bucket(piece, number);
    uint8_t* const record = args.payload + piece.chunk * args.chunk_bytes + bucket.record();
    if (piece.chunk == own) {
      uint32_t* const words = reinterpret_cast<uint32_t*>(record);
      const int64_t size = Record{bucket.values, bucket.bits}.bytes() / 4;
      for (int64_t i = bucket.lane.index; i < size; i += kWarp) words[i] = 0;
      for (int k = 0; kResidual && k < bucket.tiles(); ++k) store_tile(bucket, k, Tile{});
      return;
    }
    Noise noise = {};
    if (kStochastic) {
      noise.seed = bucket.seed(args.key + piece.chunk * args.key_step);
      // A chunk with a key of its own is no part of a sum whose ranks spread their noise.
      if (args.key_step == 0) noise.offset = noise_offset(piece.rounding, own, args.world);
    }
    const float pad = bucket.rotated ? 0.0f : load_item(bucket.in(), 0, bucket.dtype);
    encode_bucket<kTiles, kStochastic, kResidual>(
        bucket, noise, record,
        [&](int k) {
          Tile t = load_tile(bucket, k, pad);
          rotate(bucket, k, &t);
          return t;
        },
        1.0f);
  });
}

template <int kTiles, bool kStochastic, bool kResidual>
__global__ void __launch_bounds__(kThreads, blocks_of(kTiles, kResidual ? 2 : 1))
    reduce_kernel(const __grid_constant__ Table table, const ReduceArgs args) {
  const int32_t own = rank_of(args.rank);
  const Divide divide(args.divisor);
  const int64_t first = units_before(table, [&](const Piece& piece) { return piece.chunk >= own; });
  const int64_t last = units_before(table, [&](const Piece& piece) { return piece.chunk > own; });
  for_each_unit(table, first, last, [&](const Piece& piece, int64_t number) {
    if (piece.bits == 0) return clear_unit(piece, number);
    const Bucket bucket(piece, number);
    const int64_t record = bucket.record();
    Noise noise = {};
    if (kStochastic) noise.seed = bucket.seed(args.key);
    const auto sum = [&](int k) {
      Tile t = load_tile(bucket, k, 0.0f);
      rotate(bucket, k, &t);
      add_peers(bucket, args.payload + record, args.chunk_bytes, args.world, own, k, &t);
      divide_tile(divide, &t);
      return t;
    };
    // The first value of the bucket is lane 0's in tile 0; every lane with pads needs it.
    float pad = 0.0f;
    encode_bucket<kTiles, kStochastic, kResidual>(
        bucket, noise, args.chunk + record,
        [&](int k) {
          const Tile t = sum(k);
          if (k == 0) pad = __shfl_sync(kEveryLane, t.v[0][0], 0);
          return without_pads(bucket, k, t, pad);
        },
        args.divisor);
  });
}

__global__ void __launch_bounds__(kThreads, blocks_of(1))
    decode_kernel(const __grid_constant__ Table table, const DecodeArgs args) {
  for_each_unit(table, 0, table.units, [&](const Piece& piece, int64_t number) {
    const Bucket bucket(piece, number);
    const uint8_t* const record = args.payload + piece.chunk * args.chunk_bytes + bucket.record();
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
      rotate_back(bucket, k, &t);
#pragma unroll
      for (int r = 0; r < kHalfRows; ++r) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          if (bucket.rotated) t.v[r][c] = within(t.v[r][c], kLargest);
        }
      }
      store_tile(bucket, k, t);
    }
  });
}

__global__ void __launch_bounds__(kThreads, blocks_of(0))
    accumulate_kernel(const __grid_constant__ Table table, const AccumulateArgs args) {
  const int32_t own = rank_of(args.rank);
  const Divide divide(args.divisor);
  for_each_unit(table, 0, table.units, [&](const Piece& piece, int64_t number) {
    const Bucket bucket(piece, number);
    const uint8_t* const records = args.payload + bucket.record();
    for (int k = 0; k < bucket.tiles(); ++k) {
      Tile t = {};
      if (!bucket.rotated) t = load_tile(bucket, k, 0.0f);
      add_peers(bucket, records, args.row_bytes, args.peers, own, k, &t);
      if (bucket.rotated) {
        rotate_back(bucket, k, &t);
        add_tile(load_tile(bucket, k, 0.0f), &t);
      }
      divide_tile(divide, &t);
      store_tile(bucket, k, t);
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
                             bool residual, int64_t units, cudaStream_t stream) {
  const auto kernel =
      residual ? stochastic ? reduce_kernel<kTiles, true, true> : reduce_kernel<kTiles, false, true>
      : stochastic ? reduce_kernel<kTiles, true, false>
                   : reduce_kernel<kTiles, false, false>;
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
                          bool residual, int64_t units, cudaStream_t stream) {
  const auto launch_of = table.tiles <= 1            ? launch_reduce_of<1>
                         : table.tiles <= kHeldTiles ? launch_reduce_of<kHeldTiles>
                                                     : launch_reduce_of<0>;
  return launch_of(table, args, stochastic, residual, units, stream);
}

cudaError_t launch_decode(const Table& table, const DecodeArgs& args, int64_t units,
                          cudaStream_t stream) {
  return launch(decode_kernel, table, args, units, stream);
}

cudaError_t launch_accumulate(const Table& table, const AccumulateArgs& args, int64_t units,
                              cudaStream_t stream) {
  return launch(accumulate_kernel, table, args, units, stream);
}

cudaError_t load_kernels() {
  cudaError_t error = cudaSuccess;
  const auto load = [&](auto... kernels) {
    cudaFuncAttributes unused;
    ((error = error == cudaSuccess ? cudaFuncGetAttributes(&unused, kernels) : error), ...);
  };
  load(encode_kernel<0, false, false>, encode_kernel<0, false, true>, encode_kernel<0, true, false>,
       encode_kernel<0, true, true>);
  load(encode_kernel<1, false, false>, encode_kernel<1, false, true>, encode_kernel<1, true, false>,
       encode_kernel<1, true, true>);
  load(encode_kernel<kHeldTiles, false, false>, encode_kernel<kHeldTiles, false, true>,
       encode_kernel<kHeldTiles, true, false>, encode_kernel<kHeldTiles, true, true>);
  load(reduce_kernel<0, false, false>, reduce_kernel<0, false, true>, reduce_kernel<0, true, false>,
       reduce_kernel<0, true, true>);
  load(reduce_kernel<1, false, false>, reduce_kernel<1, false, true>, reduce_kernel<1, true, false>,
       reduce_kernel<1, true, true>);
  load(reduce_kernel<kHeldTiles, false, false>, reduce_kernel<kHeldTiles, false, true>,
       reduce_kernel<kHeldTiles, true, false>, reduce_kernel<kHeldTiles, true, true>);
  load(decode_kernel, accumulate_kernel);
  return error;
}

}  // namespace cgx
