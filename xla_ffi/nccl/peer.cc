#include "nccl/peer.h"

#include <stdio.h>

#include <algorithm>

namespace cgx {
namespace {

// Records of a row lie together, and rows start at a cache line.
int64_t row_bytes(const Layout& layout) {
  constexpr int64_t kLine = 128;
  return (layout.chunk_bytes + kLine - 1) / kLine * kLine;
}

std::string seconds(std::chrono::milliseconds time) {
  char text[32];
  snprintf(text, sizeof(text), "%g", static_cast<double>(time.count()) / 1000);
  return text;
}

int64_t area_bytes(const Layout& layout) { return layout.world * row_bytes(layout); }

}  // namespace

PeerLane::Window* PeerLane::find(NcclComm comm, const Layout& layout) {
  // The newest window of a communicator is its largest.
  for (auto w = windows_.rbegin(); w != windows_.rend(); ++w) {
    if (w->comm == comm) return w->shape.area_bytes >= area_bytes(layout) ? &*w : nullptr;
  }
  return nullptr;
}

std::string PeerLane::prepare(const Layout& layout, std::chrono::milliseconds timeout,
                              const NcclLibrary& nccl, NcclComm comm, int32_t rank) {
  if (std::string error = check_peers(layout.world); !error.empty()) return error;
  if (!loaded_) {
    if (const cudaError_t error = load_peer_kernels(); error != cudaSuccess) return said(error);
    loaded_ = true;
  }
  if (!nccl.has_windows()) {
    return "the NCCL that is loaded has no ncclGetPeerDevicePointer; it needs NCCL 2.29: "
           "pip install -U nvidia-nccl-cu13";
  }
  if (const Window* const window = find(comm, layout)) {
    // A communicator may have the address of an earlier one that is gone, and whose windows are
    // gone too. NCCL knows whether this window still exists.
    void* own = nullptr;
    const int result = nccl.peer_pointer(window->window, 0, rank, &own);
    if (result == NcclLibrary::kSuccess && own != nullptr) return "";
    windows_.erase(std::remove_if(windows_.begin(), windows_.end(),
                                  [&](const Window& w) { return w.comm == comm; }),
                   windows_.end());
  }
  return make(layout, timeout, nccl, comm, rank);
}

// The memory of an abandoned window is never freed, because a late peer may still write to it.
std::string PeerLane::make(const Layout& layout, std::chrono::milliseconds timeout,
                           const NcclLibrary& nccl, NcclComm comm, int32_t rank) {
  Window made = {};
  made.comm = comm;
  made.shape.world = static_cast<int32_t>(layout.world);
  made.shape.area_bytes = int64_t{1} << 16;
  while (made.shape.area_bytes < area_bytes(layout)) made.shape.area_bytes *= 2;
  const size_t bytes = made.shape.bytes();
  void* memory = nullptr;
  const std::string alloc = "ncclMemAlloc of a window of " + std::to_string(bytes) + " bytes";
  std::string text = nccl.said(alloc.c_str(), nccl.mem_alloc(&memory, bytes));
  if (!text.empty()) return text;
  made.memory = static_cast<uint8_t*>(memory);
  // The flags are cleared before a peer can raise them: it has no address until all have
  // registered.
  cudaError_t error = cudaMemset(memory, 0, made.shape.rows());
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  if (error == cudaSuccess) {
    error = cudaHostAlloc(reinterpret_cast<void**>(&made.told), sizeof(uint32_t),
                          cudaHostAllocPortable | cudaHostAllocMapped);
  }
  if (error == cudaSuccess) {
    *made.told = 0;
    error = cudaEventCreateWithFlags(&made.last, cudaEventDisableTiming);
  }
  if (error != cudaSuccess) return said(error);
  const int result =
      nccl.window_register(comm, memory, bytes, &made.window, NcclLibrary::kSymmetric);
  text = nccl.settled("ncclCommWindowRegister", comm, result, timeout);
  if (!text.empty()) return text;
  WindowState state = {};
  for (int32_t r = 0; r < made.shape.world; ++r) {
    void* peer = nullptr;
    if (made.window) {
      text = nccl.said("ncclGetPeerDevicePointer", nccl.peer_pointer(made.window, 0, r, &peer));
    }
    if (!text.empty()) return text;
    if (!peer) {
      return "rank " + std::to_string(rank) + " has no access to the memory of rank " +
             std::to_string(r) +
             "; it needs all ranks in one node, with NVLink or PCIe peer access between all GPUs, "
             "and neither NCCL_CUMEM_ENABLE=0 nor NCCL_WIN_ENABLE=0. Use exchange=\"nccl\" or "
             "\"xla\"";
    }
    state.window[r] = static_cast<uint8_t*>(r == rank ? memory : peer);
  }
  error = cudaMemcpy(memory, state.window, sizeof(state.window), cudaMemcpyHostToDevice);
  if (error == cudaSuccess) windows_.push_back(made);
  return said(error);
}

std::string PeerLane::all_reduce(const PeerSpec& spec, NcclComm comm, int32_t rank,
                                 cudaStream_t stream) {
  const Window* const window = find(comm, spec.layout);
  if (!window) return "the stage Initialize of this call has not run on its device";
  if (*const_cast<const volatile uint32_t*>(window->told) != 0) {
    return "an earlier call waited for a rank in vain, and its results are NaN: see whether every "
           "process still runs and makes the same calls in one order, and start all of them again. "
           "If a rank is only slow, use a larger timeout than Peer(timeout=" +
           seconds(spec.timeout) + ")";
  }
  std::vector<PeerTable> tables;
  std::string error = peer_tables(spec.layout, spec.in, spec.out, spec.residuals, &tables);
  if (!error.empty()) return error;
  const PeerArgs args{window->memory,         window->shape,
                      window->told,           spec.keys,
                      row_bytes(spec.layout), std::chrono::nanoseconds(spec.timeout).count(),
                      spec.divisor,           rank};
  // Calls on other streams use the same window, so wait for the last one.
  cudaError_t result = cudaStreamWaitEvent(stream, window->last, 0);
  for (const PeerTable& table : tables) {
    if (result != cudaSuccess) break;
    result = launch_peer(table, args, spec.residuals.data != nullptr, stream);
  }
  if (result == cudaSuccess) result = cudaEventRecord(window->last, stream);
  return said(result);
}

}  // namespace cgx
