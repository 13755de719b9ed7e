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

// What a rank tells the others while windows are made.
template <size_t kSize>
struct Text {
  char chars[kSize] = {};

  Text() = default;
  explicit Text(const std::string& text) { text.copy(chars, kSize); }
  std::string text() const { return std::string(chars, strnlen(chars, kSize)); }
};
struct Note {
  int64_t bytes, step;  // of all windows, and of making them: the same on all ranks
  Text<64> name;        // of shared memory
  Text<192> error;
};
static_assert(sizeof(Note) % 16 == 0, "NCCL's alignment");

// Where the ranks of a communicator meet.
struct Ranks {
  const NcclLibrary& nccl;
  NcclComm comm;
  int32_t rank, world;
  cudaStream_t stream;
  Note* board;  // device memory, for a note of each rank
  std::chrono::milliseconds patience;
  std::chrono::steady_clock::time_point deadline;
};

// Waits for what is on the stream. Returns what went wrong, or "".
std::string wait(const Ranks& ranks) {
  cudaError_t state;
  while ((state = cudaStreamQuery(ranks.stream)) == cudaErrorNotReady) {
    if (std::chrono::steady_clock::now() >= ranks.deadline) {
      return "a rank has not come to this call after " + seconds(ranks.patience) +
             " s: see whether every process still runs and makes the same calls in one order";
    }
    std::this_thread::yield();
  }
  return said(state);
}

std::string copy_to_device(const Ranks& ranks, void* to, const void* from, size_t bytes) {
  const cudaError_t error = cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, ranks.stream);
  return error == cudaSuccess ? wait(ranks) : said(error);
}

// Gives every rank the notes of all ranks. Returns what went wrong, or "": also an error that a
// rank's note tells of, which is then the same one on all ranks.
std::string exchange(const Ranks& ranks, const Note& own, std::vector<Note>* notes) {
  std::string text = copy_to_device(ranks, ranks.board + ranks.rank, &own, sizeof(Note));
  if (!text.empty()) return text;
  NcclGroup group(ranks.nccl, ranks.comm, ranks.stream);
  for (int32_t peer = 0; peer < ranks.world; ++peer) {
    if (peer == ranks.rank) continue;
    group.send(ranks.board + ranks.rank, sizeof(Note), peer);
    group.recv(ranks.board + peer, sizeof(Note), peer);
  }
  text = group.end();
  if (text.empty()) text = wait(ranks);
  if (!text.empty()) return text;
  notes->resize(ranks.world);
  const cudaError_t error =
      cudaMemcpy(notes->data(), ranks.board, ranks.world * sizeof(Note), cudaMemcpyDeviceToHost);
  if (error != cudaSuccess) return said(error);
  for (int32_t r = 0; r < ranks.world; ++r) {
    const Note& note = (*notes)[r];
    if (note.bytes != own.bytes || note.step != own.step) {
      return "rank " + std::to_string(r) + " is in another call";
    }
    if (text = note.error.text(); !text.empty()) return "rank " + std::to_string(r) + ": " + text;
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
  text = nccl.settled("ncclCommWindowRegister", ranks.comm, result, ranks.patience);
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

// The same in host memory: rank 0 makes the windows of all ranks. Flags are zeros when memory is
// new. Tells the other ranks of an `error` that this one has had.
std::string host_windows(const Ranks& ranks, const WindowShape& shape, std::string error,
                         WindowState* state) {
  const int64_t bytes = ranks.world * shape.bytes();
  SharedMemory memory;
  std::vector<Note> notes;
  if (ranks.rank == 0 && error.empty()) error = memory.create(bytes);
  error = exchange(ranks, {bytes, 1, Text<64>(memory.name()), Text<192>(error)}, &notes);
  if (!error.empty()) return error;
  error = memory.map(notes[0].name.text(), bytes);
  if (!error.empty()) {
    error = "no access to the windows, " + error +
            "; all ranks must be in one node, and share /dev/shm";
  }
  // After this, every rank has mapped the windows, and they need no name.
  error = exchange(ranks, {bytes, 2, {}, Text<192>(error)}, &notes);
  if (!error.empty()) return error;
  uint8_t* const first = memory.keep();
  for (int32_t r = 0; r < ranks.world; ++r) state->window[r] = first + r * shape.bytes();
  return "";
}

}  // namespace

const PeerLane::Window* PeerLane::find(NcclComm comm, const Layout& layout, bool in_host) const {
  // The newest window of a communicator in a kind of memory is its largest.
  for (auto w = windows_.rbegin(); w != windows_.rend(); ++w) {
    if (w->comm != comm || w->shape.in_host != in_host) continue;
    return w->shape.area_bytes >= area_bytes(layout) ? &*w : nullptr;
  }
  return nullptr;
}

std::string PeerLane::gave_up(NcclComm comm, const PeerHow& how) const {
  for (const Window& w : windows_) {
    if (w.comm != comm || *const_cast<const volatile uint32_t*>(w.told) == 0) continue;
    return "an earlier call waited for a rank in vain, and its results are NaN: see whether every "
           "process still runs and makes the same calls in one order, and start all of them again. "
           "If a rank is only slow, use a larger timeout than Peer(timeout=" +
           seconds(how.timeout) + ")";
  }
  return "";
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
           "pip install -U nvidia-nccl-cu13, or use Peer(memory=\"host\")";
  }
  int64_t generation = 0;
  std::string error = generation_of(nccl, comm, &generation);
  if (!error.empty()) return error;
  windows_.erase(
      std::remove_if(windows_.begin(), windows_.end(),
                     [&](const Window& w) { return w.comm == comm && w.generation != generation; }),
      windows_.end());
  if (error = gave_up(comm, how); !error.empty()) return error;
  if (find(comm, layout, how.in_host)) return "";
  Window made = {};
  made.comm = comm;
  made.generation = generation;
  error = make(layout, how, nccl, rank, &made);
  if (error.empty()) {
    windows_.push_back(made);
  } else {
    stream_ = nullptr, board_ = nullptr;
  }
  return error;
}

// The memory of an abandoned window is never freed, because a late peer may still write to it.
std::string PeerLane::make(const Layout& layout, const PeerHow& how, const NcclLibrary& nccl,
                           int32_t rank, Window* made) {
  WindowShape& shape = made->shape;
  shape.world = static_cast<int32_t>(layout.world);
  shape.in_host = how.in_host;
  shape.area_bytes = int64_t{1} << 16;
  while (shape.area_bytes < area_bytes(layout)) shape.area_bytes *= 2;
  cudaError_t error = cudaSuccess;
  if (!stream_) error = cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking);
  if (!board_ && error == cudaSuccess) error = cudaMalloc(&board_, kMaxPeers * sizeof(Note));
  if (error != cudaSuccess) return said(error);
  const std::chrono::milliseconds patience = std::max(how.timeout, kPeerSetup);
  const Ranks ranks{nccl,     made->comm,
                    rank,     shape.world,
                    stream_,  static_cast<Note*>(board_),
                    patience, std::chrono::steady_clock::now() + patience};
  error = cudaHostAlloc(reinterpret_cast<void**>(&made->told), sizeof(uint32_t),
                        cudaHostAllocPortable | cudaHostAllocMapped);
  if (error == cudaSuccess) {
    *made->told = 0;
    error = cudaEventCreateWithFlags(&made->last, cudaEventDisableTiming);
  }
  if (error == cudaSuccess) {
    error = cudaMalloc(reinterpret_cast<void**>(&made->state), sizeof(WindowState));
  }
  WindowState state = {};
  std::string text = said(error);
  if (how.in_host) {
    text = host_windows(ranks, shape, text, &state);
  } else if (text.empty()) {
    text = device_windows(ranks, shape, &state);
  }
  return text.empty() ? copy_to_device(ranks, made->state, &state, sizeof(state)) : text;
}

std::string PeerLane::all_reduce(const PeerSpec& spec, NcclComm comm, int32_t rank,
                                 cudaStream_t stream) {
  const Window* const window = find(comm, spec.layout, spec.how.in_host);
  if (!window) return "the stage Initialize of this call has not run on its device";
  std::string error = gave_up(comm, spec.how);
  if (!error.empty()) return error;
  std::vector<PeerTableInUnits> tables;
  error = peer_tables(spec.layout, spec.in, spec.out, spec.residuals, spec.units, &tables);
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
