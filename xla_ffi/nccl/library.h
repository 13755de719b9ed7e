// NCCL, bound at run time to the copy that XLA has loaded: nothing links to it, and building needs
// none of its headers. The functions that every call uses have had this binary interface since NCCL
// 2.18. Windows need 2.29; in older versions their functions are null.
#ifndef CGX_NCCL_LIBRARY_H_
#define CGX_NCCL_LIBRARY_H_

#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

#include <chrono>
#include <climits>
#include <map>
#include <mutex>
#include <string>
#include <thread>

namespace cgx {

using NcclComm = struct ncclComm*;
using NcclWindow = struct ncclWindow_vidmem*;

// What the functions of this folder return for an error; empty for none.
inline std::string said(cudaError_t error) {
  return error == cudaSuccess ? "" : std::string("CUDA: ") + cudaGetErrorString(error);
}

// ncclConfig_t of NCCL 2.18. Later versions tell by its size and version which fields it lacks.
// NCCL chooses the value of a field that is kUnset.
struct NcclConfig {
  static constexpr int kUnset = INT_MIN;  // NCCL_CONFIG_UNDEF_INT

  size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeefu;
  unsigned version = 21800;
  int blocking = kUnset, cluster_size = kUnset, min_blocks = kUnset, max_blocks = kUnset;
  const char* network = nullptr;
  int split_share = kUnset;
};

struct NcclLibrary {
  static constexpr int kSuccess = 0, kInProgress = 7;  // of ncclResult_t
  static constexpr int kBytes = 1;                     // ncclUint8
  static constexpr int kSymmetric = 1;                 // NCCL_WIN_COLL_SYMMETRIC
  static constexpr int kHostScalar = 1;                // ncclScalarHostImmediate

  int (*get_version)(int* version);
  const char* (*get_error_string)(int result);
  int (*comm_count)(NcclComm comm, int* count);
  int (*comm_user_rank)(NcclComm comm, int* rank);
  int (*comm_get_async_error)(NcclComm comm, int* result);
  int (*group_start)();
  int (*group_end)();
  int (*send)(const void* data, size_t count, int type, int peer, NcclComm comm,
              cudaStream_t stream);
  int (*recv)(void* data, size_t count, int type, int peer, NcclComm comm, cudaStream_t stream);

  int (*comm_split)(NcclComm comm, int color, int key, NcclComm* made, NcclConfig* config);
  int (*op_create)(int* op, void* scalar, int type, int residence, NcclComm comm);
  int (*op_destroy)(int op, NcclComm comm);

  int (*mem_alloc)(void** memory, size_t bytes);
  int (*window_register)(NcclComm comm, void* memory, size_t bytes, NcclWindow* window, int flags);
  int (*peer_pointer)(NcclWindow window, size_t offset, int peer, void** pointer);

  bool has_windows() const { return mem_alloc && window_register && peer_pointer; }

  // What went wrong in a call; empty if nothing did.
  std::string said(const char* call, int result) const {
    return result == kSuccess ? "" : std::string(call) + ": " + get_error_string(result);
  }
  // The result of a call of a nonblocking communicator, which says "in progress" and is then asked
  // until it is done, or until `waits` returns false. An aborted one answers with an error.
  template <typename Waits>
  int outcome(NcclComm comm, int result, Waits waits) const {
    while (result == kInProgress && waits()) {
      std::this_thread::yield();
      int state = kSuccess;
      const int asked = comm_get_async_error(comm, &state);
      result = asked == kSuccess ? state : asked;
    }
    return result;
  }
  // What went wrong in such a call if it takes at most `patience`. For calls whose memory is never
  // freed, because NCCL may still use it afterwards.
  std::string settled(const char* call, NcclComm comm, int result,
                      std::chrono::milliseconds patience) const {
    const auto deadline = std::chrono::steady_clock::now() + patience;
    result = outcome(comm, result, [&] { return std::chrono::steady_clock::now() < deadline; });
    if (result != kInProgress) return said(call, result);
    return "the communicator is still in progress after " + std::to_string(patience.count()) +
           " ms: a rank has not come to this call. See whether every process still runs and makes "
           "the same calls in one order; NCCL_DEBUG=INFO shows what NCCL waits for";
  }
};

// Finds the number of the communicator that lies at `comm` now, which tells apart those that XLA
// puts at one address, one after the other. XLA replaces a communicator on every rank, but maybe
// not with an equal address on every rank, so an address is no answer that all ranks agree on.
// Returns what went wrong, or "".
//
// A communicator gets a mark: an operator, which goes with it. NCCL cannot look one up, so this
// destroys the mark and creates it again. A new communicator gives its first operator the old
// number. So no two marks may be on one communicator: destroying one would find the other.
inline std::string generation_of(const NcclLibrary& nccl, NcclComm comm, int64_t* generation) {
  struct Marked {
    int mark = 0;
    int64_t generation = 0;
  };
  static std::mutex mutex;
  static auto* const all = new std::map<NcclComm, Marked>;  // outlives static destructors
  const std::lock_guard<std::mutex> lock(mutex);
  Marked& own = (*all)[comm];
  if (own.generation == 0 || nccl.op_destroy(own.mark, comm) != NcclLibrary::kSuccess) {
    ++own.generation;
  }
  *generation = own.generation;
  uint8_t one = 1;
  const int result =
      nccl.op_create(&own.mark, &one, NcclLibrary::kBytes, NcclLibrary::kHostScalar, comm);
  return nccl.said("ncclRedOpCreatePreMulSum", result);
}

// Messages of a communicator that start together. The group ends with its scope at the latest: the
// thread's later messages would join one that is open, and never start.
class NcclGroup {
 public:
  NcclGroup(const NcclLibrary& nccl, NcclComm comm, cudaStream_t stream)
      : nccl_(nccl), comm_(comm), stream_(stream) {
    note("ncclGroupStart", nccl_.group_start());
    open_ = error_.empty();
  }
  ~NcclGroup() { end(); }
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  void send(const void* data, size_t bytes, int peer) {
    if (!error_.empty()) return;
    note("ncclSend", nccl_.send(data, bytes, NcclLibrary::kBytes, peer, comm_, stream_));
  }
  void recv(void* data, size_t bytes, int peer) {
    if (!error_.empty()) return;
    note("ncclRecv", nccl_.recv(data, bytes, NcclLibrary::kBytes, peer, comm_, stream_));
  }
  // Puts the messages on the stream. Returns what went wrong, or "". A nonblocking communicator may
  // take long, and this waits: only when NCCL is done does work that is put on the stream later
  // come after the messages.
  const std::string& end() {
    if (open_) {
      open_ = false;
      note("ncclGroupEnd", nccl_.outcome(comm_, nccl_.group_end(), [] { return true; }));
    }
    return error_;
  }

 private:
  void note(const char* call, int result) {
    if (error_.empty() && result != NcclLibrary::kInProgress) error_ = nccl_.said(call, result);
  }

  const NcclLibrary& nccl_;
  const NcclComm comm_;
  const cudaStream_t stream_;
  bool open_ = false;
  std::string error_;
};

// Returns the library of this process, or null and what is wrong in `error`.
const NcclLibrary* nccl_library(std::string* error);

}  // namespace cgx

#endif  // CGX_NCCL_LIBRARY_H_
