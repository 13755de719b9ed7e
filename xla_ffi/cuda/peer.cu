// The all-reduce over peers' memory, and its launches.
#include <cuda_runtime.h>

#include <type_traits>

#include "cuda/peer.h"
#include "cuda/steps.h"

namespace cgx {
namespace {

// How warps of different devices tell each other that something is in memory: a warp that sees a
// flag also sees everything that the flag's writer had written or seen before it.
__device__ void store_release(uint64_t* flag, uint64_t value) {
  __nv_atomic_store_n(flag, value, __NV_ATOMIC_RELEASE, __NV_THREAD_SCOPE_SYSTEM);
}

__device__ uint64_t load_acquire(const uint64_t* flag) {
  return __nv_atomic_load_n(const_cast<uint64_t*>(flag), __NV_ATOMIC_ACQUIRE,
                            __NV_THREAD_SCOPE_SYSTEM);
}

// Words that make no other memory visible.
__device__ void store_relaxed(uint32_t* word, uint32_t value) {
  __nv_atomic_store_n(word, value, __NV_ATOMIC_RELAXED, __NV_THREAD_SCOPE_SYSTEM);
}

__device__ uint32_t load_relaxed(uint32_t* word) {
  return __nv_atomic_load_n(word, __NV_ATOMIC_RELAXED, __NV_THREAD_SCOPE_SYSTEM);
}

// Adds one to a count that the device's warps share. Returns the count before it.
__device__ uint32_t count_up(uint32_t* count) {
  return __nv_atomic_fetch_add(count, 1u, __NV_ATOMIC_ACQ_REL, __NV_THREAD_SCOPE_DEVICE);
}

// Nanoseconds since a time of the device's choice.
__device__ uint64_t nanoseconds() {
#if defined(__CUDA_ARCH__)
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
#else
  return static_cast<uint64_t>(clock64());
#endif
}

// Two warps for each quarter of a multiprocessor leave each the most registers that a thread can
// have, and long buckets in units need more than three leave.
constexpr int threads_of(bool in_units, int tiles) {
  return in_units && tiles != 1 && kPeerThreads > 256 ? 256 : kPeerThreads;
}

// One warp's part of a launch. Warps synchronize only through flags.
template <typename Table, int kTiles, bool kResidual>
class PeerWarp {
 public:
  __device__ PeerWarp(const Table& table, const PeerArgs& args)
      : table_(table),
        args_(args),
        state_(args.state),
        divide_(args.divisor),
        epoch_(state_->epoch + 1),
        lane_(threadIdx.x % kWarp),
        warps_(gridDim.x * kWarps),
        // All lanes have the same number. The shuffle tells the compiler so.
        warp_(blockIdx.x * kWarps +
              __shfl_sync(kEveryLane, static_cast<int>(threadIdx.x) / kWarp, 0)) {}

  __device__ __forceinline__ void run() {
    const int world = args_.shape.world, own = args_.own;
    // After a launch that gave up, it is unknown what peers hold, so nothing is sent any more.
    const bool takes_part = !has_failed();
    int next = warp_;
    // One peer after the other. Each rank starts with a different peer, so that no link has two
    // senders.
    for (int d = 1; d < world; ++d) send_to_owner(takes_part, (own + d) % world, &next);
    next = warp_;
    reduce(takes_part, &next);
    const bool sends = takes_part && !has_failed();
    for (int d = 0; sends && d < world; ++d) {
      int again = warp_;
      send_means((own + d) % world, &again);
    }
    for (int d = 0; d < world; ++d) receive(takes_part, (own + d) % world, &next);
    end();
  }

 private:
  static constexpr int kWarps = threads_of(Table::kInUnits, kTiles) / kWarp;  // of a block
  // One less than in the kernel that only reduces: all steps share one set of registers here.
  static constexpr int kAhead = (kTiles == 1 ? 3 : 2) - Table::kInUnits;

  struct Place {
    int64_t record;
    int64_t bytes;
  };

  __device__ uint8_t* window(int rank) const { return state_->window[rank]; }
  // Where `rank` finds the records of others for its chunk, u8[world, row_bytes], and where it
  // finds those of a chunk's mean, u8[row_bytes].
  __device__ uint8_t* records(int rank) const {
    return args_.shape.payload(window(rank), Leg::kToOwner);
  }
  __device__ uint8_t* means(int rank, int chunk) const {
    if (args_.shape.in_host) return args_.shape.payload(window(chunk), Leg::kFromOwner);
    return args_.shape.payload(window(rank), Leg::kFromOwner) + chunk * args_.row_bytes;
  }
  __device__ uint64_t* arrived(int rank, Leg leg, int packet, int from) const {
    return args_.shape.arrived(window(rank), leg, packet, from);
  }

  __device__ bool has_failed() const {
    return __shfl_sync(kEveryLane, load_relaxed(&state_->failed), 0) != 0;
  }

  // Calls f(packet, first unit, last unit + 1) for this warp's share of a chunk's packets. `next`
  // numbers packets across chunks, so that warps without a packet in one chunk come first in the
  // next.
  template <typename F>
  __device__ void for_each_packet(int chunk, int* next, F f) const {
    const int begin = table_.chunk[chunk], end = table_.chunk[chunk + 1];
    const int count = (end - begin + table_.packet - 1) / table_.packet;
    int packet = *next;
    for (; packet < count; packet += warps_) {
      const int first = begin + packet * table_.packet;
      f(packet, first, ::min(first + table_.packet, end));
    }
    *next = packet - count;
  }
  __device__ int piece_of(int unit) const {
    return first_piece(table_, [&](const Piece& piece) { return piece.before > unit; }) - 1;
  }
  // work(number of the piece) returns a function, which is then called with the number of each unit
  // in that piece.
  template <typename Work>
  __device__ void for_each_unit(int first, int end, Work work) const {
    int unit = first;
    for (int p = piece_of(first); unit < end; ++p) {
      const Piece& piece = table_.piece[p];
      const auto of_unit = work(p);
      for (; unit < end && unit - piece.before <= piece.last; ++unit) of_unit(unit - piece.before);
    }
  }
  // Where a unit's record lies in its row.
  __device__ Place place(int unit) const {
    const Piece& piece = table_.piece[piece_of(unit)];
    const int number = unit - piece.before;
    return {piece.record + static_cast<int64_t>(number) * piece.stride(),
            Record{number == piece.last ? piece.tail : piece.unit, static_cast<int32_t>(piece.bits)}
                .bytes()};
  }

  __device__ void send_to_owner(bool takes_part, int to, int* next) const {
    uint8_t* const row = records(to) + args_.own * args_.row_bytes;
    for_each_packet(to, next, [&](int packet, int first, int end) {
      if (!takes_part) {
        if (kResidual) poison(first, end, /*results=*/false);
        return;
      }
      for_each_unit(first, end, [&](int p) {
        const Piece& piece = table_.piece[p];
        const LeafUnits* const units = table_.leaf_units(p);
        const LeafSeed rotation = Rotation::leaf_seed(piece.number);
        const bool noisy = piece.rounding != Rounding::kNearest;
        const LeafSeed seed = noisy ? noise_of<true>(args_.keys, piece) : LeafSeed(0, 0, 0);
        const float offset =
            noisy ? noise_offset(piece.rounding, args_.own, args_.shape.world) : 0.0f;
        return [=, &piece](int number) {
          const Bucket bucket(piece, rotation, number);
          const Noise noise{seed.bucket(bucket.of_leaf()), offset};
          uint8_t* const record = row + bucket.record();
          const FactorsOf<Table> factors(bucket, units);
          noisy ? encode_values<kTiles, true, kResidual>(bucket, noise, factors, record)
                : encode_values<kTiles, false, kResidual>(bucket, noise, factors, record);
        };
      });
      __syncwarp();
      if (lane_ == 0) store_release(arrived(to, Leg::kToOwner, packet, args_.own), epoch_);
    });
  }

  __device__ void reduce(bool takes_part, int* next) const {
    const int world = args_.shape.world, own = args_.own;
    const uint8_t* const rows = records(own);
    uint8_t* const mean = means(own, own);
    for_each_packet(own, next, [&](int packet, int first, int end) {
      const bool sends = lane_ < world && lane_ != own;
      const uint64_t* const flag = arrived(own, Leg::kToOwner, packet, lane_);
      if (!takes_part || !wait(sends ? flag : nullptr)) {
        if (kResidual) poison(first, end, /*results=*/false);
        return;
      }
      for_each_unit(first, end, [&](int p) {
        const Piece& piece = table_.piece[p];
        const LeafUnits* const units = table_.leaf_units(p);
        const LeafSeed rotation = Rotation::leaf_seed(piece.number);
        const bool noisy = piece.rounding != Rounding::kNearest;
        const LeafSeed seed = noisy ? noise_of<true>(args_.keys + 2, piece) : LeafSeed(0, 0, 0);
        return [=, &piece](int number) {
          const Bucket bucket(piece, rotation, number);
          const Noise noise{seed.bucket(bucket.of_leaf()), 0.0f};
          const FactorsOf<Table> factors(bucket, units);
          uint8_t* const record = mean + bucket.record();
          const auto reduce = [&](auto stochastic) {
            reduce_records<kTiles, kAhead, decltype(stochastic)::value, kResidual>(
                bucket, noise, factors, rows, args_.row_bytes, world, own, divide_, args_.divisor,
                record);
          };
          noisy ? reduce(std::true_type()) : reduce(std::false_type());
        };
      });
    });
  }

  // Sends the means of the rank's own chunk. Each packet is sent by the warp that computed it.
  __device__ void send_means(int to, int* next) const {
    const int own = args_.own;
    const uint8_t* const here = means(own, own);
    uint8_t* const there = means(to, own);
    for_each_packet(own, next, [&](int packet, int first, int end) {
      if (there != here) {
        // A packet's records lie one after the other, and start at multiples of 4 bytes.
        const Place head = place(first), tail = place(end - 1);
        const int words = static_cast<int>((tail.record + tail.bytes - head.record) / 4);
        const auto* const from = reinterpret_cast<const uint32_t*>(here + head.record);
        auto* const at = reinterpret_cast<uint32_t*>(there + head.record);
        for (int i = lane_; i < words; i += kWarp) at[i] = from[i];
      }
      __syncwarp();
      if (lane_ == 0) store_release(arrived(to, Leg::kFromOwner, packet, own), epoch_);
    });
  }

  __device__ void receive(bool takes_part, int chunk, int* next) const {
    const uint8_t* const row = means(args_.own, chunk);
    for_each_packet(chunk, next, [&](int packet, int first, int end) {
      const uint64_t* const flag = arrived(args_.own, Leg::kFromOwner, packet, chunk);
      if (!takes_part || !wait(lane_ == 0 ? flag : nullptr)) {
        return poison(first, end, /*results=*/true);
      }
      for_each_unit(first, end, [&](int p) {
        Piece piece = table_.piece[p];
        piece.out = table_.result[p];
        const LeafUnits* const units = table_.leaf_units(p);
        const LeafSeed rotation = Rotation::leaf_seed(piece.number);
        return [=](int number) {
          const Bucket bucket(piece, rotation, number);
          const FactorsOf<Table> factors(bucket, units);
          decode_record(bucket, factors, row + bucket.record());
        };
      });
    });
  }

  // Writes NaN to the results or the residuals of these units.
  __device__ void poison(int first, int end, bool results) const {
    for_each_unit(first, end, [&](int p) {
      Piece piece = table_.piece[p];
      if (results) piece.out = table_.result[p];
      const LeafSeed none(0, 0, 0);
      return [=](int number) {
        const Bucket bucket(piece, none, number);
        for (int k = 0; k < bucket.tiles(); ++k) {
          store_tile<false>(bucket, k, filled(bit_cast<float>(kQuietNan)));
        }
      };
    });
  }

  // Waits until each lane's flag, if it has one, has been raised in this launch. Returns false if
  // it gives up.
  __device__ bool wait(const uint64_t* flag) const {
    const uint64_t begin = nanoseconds();
    while (true) {
      const bool raised = !flag || load_acquire(flag) >= epoch_;
      if (__all_sync(kEveryLane, raised)) break;
      const bool late = nanoseconds() - begin > static_cast<uint64_t>(args_.patience);
      if (__any_sync(kEveryLane, late || load_relaxed(&state_->failed) != 0)) {
        if (lane_ == 0) {
          store_relaxed(&state_->failed, 1);
          store_relaxed(args_.told, 1);
        }
        return false;
      }
      __nanosleep(100);
    }
    __syncwarp();  // every lane now sees what one lane has acquired
    return true;
  }

  // The last warp to end counts the launch.
  __device__ void end() const {
    __syncwarp();
    if (lane_ == 0 && count_up(&state_->ended) + 1 == static_cast<uint32_t>(warps_)) {
      state_->ended = 0;
      state_->epoch = epoch_;
    }
  }

  const Table& table_;
  const PeerArgs& args_;
  WindowState* const state_;
  const Divide divide_;
  const uint64_t epoch_;
  const int lane_, warps_, warp_;
};

template <typename Table, int kTiles, bool kResidual>
__global__ void __launch_bounds__(threads_of(Table::kInUnits, kTiles), 1)
    peer_kernel(const __grid_constant__ Table table, const __grid_constant__ PeerArgs args) {
  PeerWarp<Table, kTiles, kResidual>(table, args).run();
}

// Half of the blocks that the device can run at once, or fewer if there is less work. All blocks of
// a launch must run at once, because a waiting warp may wait for any warp of another device. The
// other half is left to kernels that XLA runs beside the call.
template <typename Kernel>
cudaError_t blocks_of(Kernel kernel, int threads, const PeerTable& table, int world, int sharers,
                      int* blocks) {
  int device, processors, held;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&held, kernel, threads, 0);
  }
  if (error != cudaSuccess) return error;
  const int share = processors * held / 2 / sharers, most = share > 1 ? share : 1;
  const int warps = threads / kWarp;
  const int packets = table.chunk[world] / table.packet + world;
  const int useful = (packets + warps - 1) / warps;
  *blocks = useful < most ? useful : most;
  return cudaSuccess;
}

template <typename Table>
constexpr auto kernel_of(int tiles, bool residual) {
  return tiles <= 1 ? (residual ? peer_kernel<Table, 1, true> : peer_kernel<Table, 1, false>)
                    : (residual ? peer_kernel<Table, 0, true> : peer_kernel<Table, 0, false>);
}

template <typename Table>
cudaError_t launch(const Table& table, const PeerArgs& args, bool residual, int sharers,
                   cudaStream_t stream) {
  const auto kernel = kernel_of<Table>(table.tiles, residual);
  const int threads = threads_of(Table::kInUnits, table.tiles);
  int blocks;
  const cudaError_t error = blocks_of(kernel, threads, table, args.shape.world, sharers, &blocks);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute together = {};
  together.id = cudaLaunchAttributeCooperative;
  together.val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  config.attrs = &together;
  config.numAttrs = sharers == 1;  // a device may run cooperative launches one by one
  return cudaLaunchKernelEx(&config, kernel, table, args);
}

}  // namespace

cudaError_t launch_peer(const PeerTableInUnits& table, const PeerArgs& args, PeerOptions options,
                        cudaStream_t stream) {
  const PeerTable& without = table;
  return options.in_units ? launch(table, args, options.residual, options.sharers, stream)
                          : launch(without, args, options.residual, options.sharers, stream);
}

cudaError_t load_peer_kernels() {
  cudaError_t error = cudaSuccess;
  const auto load = [&](auto kernel) {
    cudaFuncAttributes unused;
    if (error == cudaSuccess) error = cudaFuncGetAttributes(&unused, kernel);
  };
  for (const int tiles : {1, 2}) {
    for (const bool residual : {false, true}) {
      load(kernel_of<PeerTable>(tiles, residual));
      load(kernel_of<PeerTableInUnits>(tiles, residual));
    }
  }
  return error;
}

}  // namespace cgx
