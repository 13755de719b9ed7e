#include "nccl/peer.h"

#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <thread>

#include "nccl/shared_memory.h"

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

// The ranks of a communicator, which meet while windows are made.
struct Ranks {
  const NcclLibrary& nccl;
  NcclComm comm;
  int32_t rank, world;
  cudaStream_t stream;
  std::chrono::milliseconds timeout;
};

// Waits for what is on the stream. Returns what went wrong, or "".
std::string wait(const Ranks& ranks) {
  const auto deadline = std::chrono::steady_clock::now() + ranks.timeout;
  cudaError_t state;
  while ((state = cudaStreamQuery(ranks.stream)) == cudaErrorNotReady) {
    if (std::chrono::steady_clock::now() >= deadline) {
      return "a rank has not come to this call after " + std::to_string(ranks.timeout.count()) +
             " ms: see whether every process still runs and makes the same calls in one order";
    }
    std::this_thread::yield();
  }
  return said(state);
}

std::string copy_to_device(const Ranks& ranks, void* to, const void* from, size_t bytes) {
  const cudaError_t error = cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, ranks.stream);
  return error == cudaSuccess ? wait(ranks) : said(error);
}

// What a rank tells the others.
template <size_t kSize>
struct Text {
  char chars[kSize] = {};

  Text() = default;
  explicit Text(const std::string& text) { text.copy(chars, kSize); }
  std::string text() const { return std::string(chars, strnlen(chars, kSize)); }
};
struct Note {
  Text<64> name;  // of shared memory
  Text<192> error;
};
static_assert(sizeof(Note) % 16 == 0, "NCCL's alignment");

// Gives every rank the notes of all ranks. Returns what went wrong, or "": also an error that a
// rank's note tells of, which is then the same one on all ranks.
std::string exchange(const Ranks& ranks, const Note& own, std::vector<Note>* notes) {
  notes->assign(ranks.world, Note{});
  const size_t bytes = ranks.world * sizeof(Note);
  void* memory = nullptr;
  cudaError_t error = cudaMalloc(&memory, bytes);
  if (error != cudaSuccess) return said(error);
  Note* const there = static_cast<Note*>(memory);
  std::string text = copy_to_device(ranks, there + ranks.rank, &own, sizeof(Note));
  if (!text.empty()) return text;
  NcclGroup group(ranks.nccl, ranks.comm, ranks.stream);
  for (int32_t peer = 0; peer < ranks.world; ++peer) {
    if (peer == ranks.rank) continue;
    group.send(there + ranks.rank, sizeof(Note), peer);
    group.recv(there + peer, sizeof(Note), peer);
  }
  text = group.end();
  // After an error the memory is never freed, because messages may still use it.
  if (text.empty()) text = wait(ranks);
  if (!text.empty()) return text;
  error = cudaMemcpy(notes->data(), there, bytes, cudaMemcpyDeviceToHost);
  if (error == cudaSuccess) error = cudaFree(there);
  if (error != cudaSuccess) return said(error);
  for (int32_t r = 0; r < ranks.world; ++r) {
    const std::string told = (*notes)[r].error.text();
    if (!told.empty()) return "rank " + std::to_string(r) + ": " + told;
  }
  return "";
}

// Makes this rank's window of device memory, and finds those of the others. Returns what went
// wrong, or "".
std::string device_windows(const Ranks& ranks, const WindowShape& shape, WindowState* state) {
  const NcclLibrary& nccl = ranks.nccl;
  const size_t bytes = shape.bytes();
  void* memory = nullptr;
  const std::string alloc = "ncclMemAlloc of a window of " + std::to_string(bytes) + " bytes";
  std::string text = nccl.said(alloc.c_str(), nccl.mem_alloc(&memory, bytes));
  if (!text.empty()) return text;
  // The flags are cleared before a peer can raise them: it has no address until all have
  // registered.
  cudaError_t error = cudaMemset(memory, 0, shape.rows());
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  if (error != cudaSuccess) return said(error);
  NcclWindow window = nullptr;
  const int result =
      nccl.window_register(ranks.comm, memory, bytes, &window, NcclLibrary::kSymmetric);
  text = nccl.settled("ncclCommWindowRegister", ranks.comm, result, ranks.timeout);
  if (!text.empty()) return text;
  for (int32_t r = 0; r < ranks.world; ++r) {
    void* peer = nullptr;
    if (window) {
      text = nccl.said("ncclGetPeerDevicePointer", nccl.peer_pointer(window, 0, r, &peer));
    }
    if (!text.empty()) return text;
    if (!peer) {
      return "rank " + std::to_string(ranks.rank) + " has no access to the memory of rank " +
             std::to_string(r) +
             "; it needs all ranks in one node, with NVLink or PCIe peer access between all GPUs, "
             "and neither NCCL_CUMEM_ENABLE=0 nor NCCL_WIN_ENABLE=0. Without peer access, use "
             "Peer(memory=\"host\"); otherwise exchange=\"nccl\" or \"xla\"";
    }
    state->window[r] = static_cast<uint8_t*>(r == ranks.rank ? memory : peer);
  }
  return "";
}

// The same in host memory. Its flags are zeros when it is new.
std::string host_windows(const Ranks& ranks, const WindowShape& shape, WindowState* state) {
  SharedMemory own;
  std::vector<Note> notes;
  const std::string made = own.create(shape.bytes());
  std::string text = exchange(ranks, {Text<64>(own.name()), Text<192>(made)}, &notes);
  if (!text.empty()) return text;
  std::string mapped;
  for (int32_t r = 0; r < ranks.world && mapped.empty(); ++r) {
    mapped = map_shared(notes[r].name.text(), shape.bytes(), &state->window[r]);
    if (mapped.empty()) continue;
    mapped = "no access to the window of rank " + std::to_string(r) + ", " + mapped +
             "; all ranks must be in one node, and share /dev/shm";
  }
  // After this, every rank has mapped all windows, and they need no name.
  return exchange(ranks, {{}, Text<192>(mapped)}, &notes);
}

}  // namespace

PeerLane::Window* PeerLane::find(NcclComm comm, const Layout& layout, bool in_host) {
  // The newest window of a communicator is its largest.
  for (auto w = windows_.rbegin(); w != windows_.rend(); ++w) {
    if (w->comm != comm || w->shape.in_host != in_host) continue;
    return w->shape.area_bytes >= area_bytes(layout) ? &*w : nullptr;
  }
  return nullptr;
}

std::string PeerLane::prepare(const Layout& layout, const PeerHow& how, const NcclLibrary& nccl,
                              NcclComm comm, int32_t rank) {
  if (std::string error = check_peers(layout.world); !error.empty()) return error;
  if (!loaded_) {
    if (const cudaError_t error = load_peer_kernels(); error != cudaSuccess) return said(error);
    loaded_ = true;
  }
  if (!how.in_host && !nccl.has_windows()) {
    return "the NCCL that is loaded has no ncclGetPeerDevicePointer; it needs NCCL 2.29: "
           "pip install -U nvidia-nccl-cu13";
  }
  if (Window* const window = find(comm, layout, how.in_host)) {
    if (nccl.unmark(comm, window->mark)) return nccl.mark(comm, &window->mark);
    windows_.erase(std::remove_if(windows_.begin(), windows_.end(),
                                  [&](const Window& w) { return w.comm == comm; }),
                   windows_.end());
  }
  return make(layout, how, nccl, comm, rank);
}

// The memory of an abandoned window is never freed, because a late peer may still write to it.
std::string PeerLane::make(const Layout& layout, const PeerHow& how, const NcclLibrary& nccl,
                           NcclComm comm, int32_t rank) {
  Window made = {};
  made.comm = comm;
  made.shape.in_host = how.in_host;
  made.shape.world = static_cast<int32_t>(layout.world);
  made.shape.area_bytes = int64_t{1} << 16;
  while (made.shape.area_bytes < area_bytes(layout)) made.shape.area_bytes *= 2;
  cudaError_t error =
      stream_ ? cudaSuccess : cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking);
  if (error == cudaSuccess) {
    error = cudaHostAlloc(reinterpret_cast<void**>(&made.told), sizeof(uint32_t),
                          cudaHostAllocPortable | cudaHostAllocMapped);
  }
  if (error == cudaSuccess) {
    *made.told = 0;
    error = cudaEventCreateWithFlags(&made.last, cudaEventDisableTiming);
  }
  if (error == cudaSuccess) {
    error = cudaMalloc(reinterpret_cast<void**>(&made.state), sizeof(WindowState));
  }
  if (error != cudaSuccess) return said(error);
  const Ranks ranks{nccl, comm, rank, made.shape.world, stream_, how.timeout};
  WindowState state = {};
  std::string text = (how.in_host ? host_windows : device_windows)(ranks, made.shape, &state);
  if (text.empty()) text = nccl.mark(comm, &made.mark);
  if (!text.empty()) return text;
  text = copy_to_device(ranks, made.state, &state, sizeof(state));
  if (text.empty()) windows_.push_back(made);
  return text;
}

std::string PeerLane::all_reduce(const PeerSpec& spec, NcclComm comm, int32_t rank,
                                 cudaStream_t stream) {
  const Window* const window = find(comm, spec.layout, spec.how.in_host);
  if (!window) return "the stage Initialize of this call has not run on its device";
  if (*const_cast<const volatile uint32_t*>(window->told) != 0) {
    return "an earlier call waited for a rank in vain, and its results are NaN: see whether every "
           "process still runs and makes the same calls in one order, and start all of them again. "
           "If a rank is only slow, use a larger timeout than Peer(timeout=" +
           seconds(spec.how.timeout) + ")";
  }
  std::vector<PeerTableInUnits> tables;
  std::string error =
      peer_tables(spec.layout, spec.in, spec.out, spec.residuals, spec.units, &tables);
  if (!error.empty()) return error;
  const PeerArgs args{window->state,          window->shape,
                      window->told,           spec.keys,
                      row_bytes(spec.layout), std::chrono::nanoseconds(spec.how.timeout).count(),
                      spec.divisor,           rank};
  const PeerOptions options{spec.residuals.data != nullptr, spec.units != nullptr};
  // Calls on other streams use the same window, so wait for the last one.
  cudaError_t result = cudaStreamWaitEvent(stream, window->last, 0);
  for (const PeerTableInUnits& table : tables) {
    if (result != cudaSuccess) break;
    result = launch_peer(table, args, options, stream);
  }
  if (result == cudaSuccess) result = cudaEventRecord(window->last, stream);
  return said(result);
}

}  // namespace cgx
