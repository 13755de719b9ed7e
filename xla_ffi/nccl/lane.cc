#include "nccl/lane.h"

#include <algorithm>

#include "cuda/kernels.h"

namespace cgx {
namespace {

// A message kernel occupies the GPU until its peers' kernels run, so the kernels of all wires must
// fit on the GPU at once, with a multiprocessor for each thread block.
constexpr int kXlaBlocks = 32;  // of XLA's communicator, at most
constexpr int kMostBlocks = 4;  // of another communicator

constexpr int64_t kApart = 16;  // bytes between two messages: NCCL's alignment

// The thread blocks of each communicator that is split, on a device of so many multiprocessors.
// Does not depend on the number of streams, because later calls may need more of them.
int blocks_on(int processors) {
  return std::clamp((processors - kXlaBlocks) / static_cast<int>(kMostStreams - 1), 1, kMostBlocks);
}

cudaError_t count_processors(int* processors) {
  int device;
  const cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(processors, cudaDevAttrMultiProcessorCount, device);
}

cudaError_t add_stream(std::vector<cudaStream_t>* streams) {
  int least, greatest;
  cudaStream_t stream = nullptr;
  cudaError_t error = cudaDeviceGetStreamPriorityRange(&least, &greatest);
  if (error == cudaSuccess) {
    error = cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest);
  }
  if (error == cudaSuccess) streams->push_back(stream);
  return error;
}

// Splits off a communicator of all ranks of `from`.
std::string split(const NcclLibrary& nccl, NcclComm from, int32_t rank, NcclConfig* config,
                  std::chrono::milliseconds patience, NcclComm* made) {
  const int result = nccl.comm_split(from, /*color=*/0, rank, made, config);
  return nccl.settled("ncclCommSplit", from, result, patience);
}

}  // namespace

std::string CudaLane::prepare(int64_t segments) {
  const auto make = [&]() -> cudaError_t {
    if (!loaded_) {
      if (const cudaError_t error = load_kernels(); error != cudaSuccess) return error;
      loaded_ = true;
    }
    if (streams_.empty()) {
      if (const cudaError_t error = add_stream(&streams_); error != cudaSuccess) return error;
    }
    while (static_cast<int64_t>(events_.size()) < events_of(segments)) {
      cudaEvent_t event;
      const cudaError_t error = cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
      if (error != cudaSuccess) return error;
      events_.push_back(event);
    }
    return cudaSuccess;
  };
  return said(make());
}

std::string CudaLane::connect(int64_t streams, const NcclLibrary& nccl, NcclComm comm, int32_t rank,
                              int64_t world, std::chrono::milliseconds patience) {
  int processors = 0;
  if (const cudaError_t error = count_processors(&processors); error != cudaSuccess) {
    return said(error);
  }
  if (streams > 1 && processors < kXlaBlocks + streams - 1) {
    const int64_t most = std::max(1, processors - kXlaBlocks + 1);
    return "streams=" + std::to_string(streams) + " needs " +
           std::to_string(kXlaBlocks + streams - 1) +
           " multiprocessors, so that the messages of all streams can run at once, but this GPU "
           "has " +
           std::to_string(processors) + ": use streams=" + std::to_string(most);
  }
  while (static_cast<int64_t>(streams_.size()) < streams) {
    if (const cudaError_t error = add_stream(&streams_); error != cudaSuccess) return said(error);
  }
  if (world > ranks_) {
    void* memory = nullptr;
    const cudaError_t error = cudaMalloc(&memory, (1 + world) * kApart);
    if (error != cudaSuccess) return said(error);
    bytes_ = static_cast<uint8_t*>(memory);
    ranks_ = world;
  }
  Family* family = nullptr;
  if (std::string error = current(nccl, comm, &family); !error.empty()) return error;
  if (family->error.empty() && family->count < streams - 1) {
    family->error = grow(family, streams - 1, blocks_on(processors), nccl, rank, patience);
  }
  if (family->error.empty() && family->connected < streams) {
    family->error = greet(family, streams, nccl, rank, world);
  }
  return family->error;
}

CudaLane::Family* CudaLane::find(NcclComm comm) {
  for (Family& family : families_) {
    if (family.comm == comm) return &family;
  }
  return nullptr;
}

// Finds or creates the family of the communicator that lies at `comm` now.
std::string CudaLane::current(const NcclLibrary& nccl, NcclComm comm, Family** family) {
  int64_t generation = 0;
  std::string error = generation_of(nccl, comm, &generation);
  *family = find(comm);
  if (error.empty() && (!*family || (*family)->generation != generation)) {
    *family = &families_.emplace_front();
    (*family)->comm = comm;
    (*family)->generation = generation;
  }
  return error;
}

// XLA's communicators share their connections with the communicators that are split from them, and
// messages over shared connections never travel at once. So the stem, which shares XLA's
// connections, carries no messages. Communicators that are split from the stem have their own
// connections.
std::string CudaLane::grow(Family* family, int64_t count, int blocks, const NcclLibrary& nccl,
                           int32_t rank, std::chrono::milliseconds patience) {
  // NCCL does not split a communicator that still has messages on a stream.
  if (const cudaError_t error = cudaDeviceSynchronize(); error != cudaSuccess) return said(error);
  NcclConfig config;
  config.split_share = 0;
  config.max_blocks = blocks;
  std::string error;
  if (!family->stem) error = split(nccl, family->comm, rank, &config, patience, &family->stem);
  while (error.empty() && family->count < count) {
    error = split(nccl, family->stem, rank, nullptr, patience, &family->made[family->count]);
    family->count += error.empty();
  }
  return error;
}

// NCCL connects two ranks at their first messages: it creates things and waits for the other rank.
// Calls may do neither, so a byte goes between all ranks before them. A group ends when its ranks
// are connected, so nothing has to wait for the byte.
std::string CudaLane::greet(Family* family, int64_t count, const NcclLibrary& nccl, int32_t rank,
                            int64_t world) {
  for (int64_t& i = family->connected; i < count; ++i) {
    NcclGroup group(nccl, i == 0 ? family->comm : family->made[i - 1], streams_[i]);
    for (int32_t peer = 0; peer < world; ++peer) {
      if (peer == rank) continue;
      group.send(bytes_, 1, peer);
      group.recv(bytes_ + kApart * (1 + peer), 1, peer);
    }
    if (const std::string& error = group.end(); !error.empty()) return error;
  }
  return "";
}

std::vector<Wire> CudaLane::wires(NcclComm comm, int64_t streams) {
  if (static_cast<int64_t>(streams_.size()) < streams) return {};
  std::vector<Wire> wires = {{comm, streams_[0]}};
  const Family* const family = streams > 1 ? find(comm) : nullptr;
  for (int64_t i = 1; i < streams; ++i) {
    if (!family || !family->error.empty() || family->count < i) return {};
    wires.push_back({family->made[i - 1], streams_[i]});
  }
  return wires;
}

}  // namespace cgx
