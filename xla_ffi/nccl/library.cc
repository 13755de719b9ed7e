#include "nccl/library.h"

#include <dlfcn.h>

namespace cgx {
namespace {

struct Loaded {
  NcclLibrary library = {};
  std::string error;

  Loaded() {
    // XLA opens NCCL by this bare name too, and the dynamic linker returns the loaded copy to
    // everyone who asks for the same name. The first dlopen only finds a loaded copy, so it never
    // brings in a second one.
    const char* const name = "libnccl.so.2";
    void* handle = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (!handle) handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
      error = "libnccl.so.2 is not loaded and cannot be found; pip install \"jax[cuda13]\"";
      return;
    }
    bind(handle, "ncclGetVersion", &library.get_version);
    bind(handle, "ncclGetErrorString", &library.get_error_string);
    bind(handle, "ncclCommCount", &library.comm_count);
    bind(handle, "ncclCommUserRank", &library.comm_user_rank);
    bind(handle, "ncclCommGetAsyncError", &library.comm_get_async_error);
    bind(handle, "ncclGroupStart", &library.group_start);
    bind(handle, "ncclGroupEnd", &library.group_end);
    bind(handle, "ncclSend", &library.send);
    bind(handle, "ncclRecv", &library.recv);
    bind(handle, "ncclCommSplit", &library.comm_split);
    bind(handle, "ncclRedOpCreatePreMulSum", &library.op_create);
    bind(handle, "ncclRedOpDestroy", &library.op_destroy);
    find(handle, "ncclMemAlloc", &library.mem_alloc);
    find(handle, "ncclCommWindowRegister", &library.window_register);
    find(handle, "ncclGetPeerDevicePointer", &library.peer_pointer);
  }

 private:
  template <typename F>
  static void find(void* handle, const char* symbol, F* function) {
    *function = reinterpret_cast<F>(dlsym(handle, symbol));
  }
  template <typename F>
  void bind(void* handle, const char* symbol, F* function) {
    find(handle, symbol, function);
    if (!*function) error = std::string("libnccl.so.2 has no ") + symbol + "; it needs NCCL 2.18";
  }
};

}  // namespace

const NcclLibrary* nccl_library(std::string* error) {
  static const Loaded loaded;
  if (loaded.error.empty()) return &loaded.library;
  *error = loaded.error;
  return nullptr;
}

}  // namespace cgx
