#include "mpi/library.h"

#include <dlfcn.h>
#if defined(__linux__)
#include <link.h>
#endif
#include <string.h>

#include <set>

namespace cgx {
namespace {

// The C API, which is the same in MPICH's, Open MPI's and the standard ABI except for the type of
// handles.
template <typename Handle>
struct Functions {
  int (*send)(const void*, int, Handle, int, int, Handle, Handle*);
  int (*receive)(void*, int, Handle, int, int, Handle, Handle*);
  int (*test_some)(int, Handle*, int*, int*, void*);
  int (*error_text)(int, char*, int*);
  int (*cancel)(Handle*);
  int (*wait)(Handle*, void*);
};

constexpr int kErrorTextBytes = 8192;  // above every ABI's MPI_MAX_ERROR_STRING

template <typename Handle>
class MpiPort : public Port {
 public:
  MpiPort(const Functions<Handle>& mpi, const MpiHandles& handles, std::vector<int32_t> peers)
      : mpi_(mpi),
        communicator_(static_cast<Handle>(handles.communicator)),
        byte_(static_cast<Handle>(handles.byte_type)),
        null_(static_cast<Handle>(handles.null_request)),
        status_bytes_(handles.status_bytes),
        error_offset_(handles.error_offset),
        peers_(std::move(peers)) {}

  std::string send(int64_t peer, int tag, const void* from, int64_t bytes,
                   int64_t ticket) override {
    Handle request = null_;
    const int code =
        mpi_.send(from, static_cast<int>(bytes), byte_, peers_[peer], tag, communicator_, &request);
    return posted(code, "MPI_Isend", request, {ticket, peer, true});
  }

  std::string receive(int64_t peer, int tag, void* to, int64_t bytes, int64_t ticket) override {
    Handle request = null_;
    const int code = mpi_.receive(to, static_cast<int>(bytes), byte_, peers_[peer], tag,
                                  communicator_, &request);
    return posted(code, "MPI_Irecv", request, {ticket, peer, false});
  }

  std::string poll(std::vector<int64_t>* done) override {
    if (requests_.empty()) return "";
    const int count = static_cast<int>(requests_.size());
    indices_.resize(count);
    statuses_.resize(count * status_bytes_);
    int finished = 0;
    const int code =
        mpi_.test_some(count, requests_.data(), &finished, indices_.data(), statuses_.data());
    const std::string error = code == 0 ? "" : failed(code, finished);
    if (finished <= 0) return error;
    for (int i = 0; i < finished; ++i) {
      if (code == 0 || error_of(i) == 0) done->push_back(messages_[indices_[i]].ticket);
    }
    size_t kept = 0;
    for (size_t i = 0; i < requests_.size(); ++i) {
      if (requests_[i] == null_) continue;
      requests_[kept] = requests_[i];
      messages_[kept++] = messages_[i];
    }
    requests_.resize(kept);
    messages_.resize(kept);
    return error;
  }

  void cancel() override {
    std::vector<char> status(status_bytes_);
    for (size_t i = 0; i < requests_.size(); ++i) {
      if (messages_[i].sends || requests_[i] == null_) continue;
      if (mpi_.cancel(&requests_[i]) == 0) mpi_.wait(&requests_[i], status.data());
    }
  }

 private:
  struct Message {
    int64_t ticket, peer;
    bool sends;
  };

  std::string posted(int code, const char* call, Handle request, const Message& message) {
    if (code != 0) return text(code, call, &message);
    requests_.push_back(request);
    messages_.push_back(message);
    return "";
  }
  // The error text for MPI_Testsome's `code`. One of the messages that it finished may have failed.
  std::string failed(int code, int finished) const {
    for (int i = 0; i < finished; ++i) {
      if (const int own = error_of(i)) return text(own, "MPI_Testsome", &messages_[indices_[i]]);
    }
    return text(code, "MPI_Testsome", messages_.size() == 1 ? &messages_[0] : nullptr);
  }
  // The error of the `i`-th message that the last MPI_Testsome finished; only set if that failed.
  int error_of(int i) const {
    int error;
    memcpy(&error, statuses_.data() + i * status_bytes_ + error_offset_, sizeof(error));
    return error;
  }
  std::string text(int code, const char* call, const Message* message) const {
    std::vector<char> buffer(kErrorTextBytes);
    int length = 0;
    if (mpi_.error_text(code, buffer.data(), &length) != 0) length = 0;
    std::string whose;
    if (message) {
      whose = std::string(message->sends ? "a message to" : "a message from") + " rank " +
              std::to_string(message->peer) + ": ";
    }
    return whose + call + " failed with code " + std::to_string(code) + " (" +
           std::string(buffer.data(), length) +
           "); that rank has ended or cannot be reached: look at its output and at the network";
  }

  const Functions<Handle> mpi_;
  const Handle communicator_, byte_, null_;
  const int64_t status_bytes_, error_offset_;
  const std::vector<int32_t> peers_;
  std::vector<Handle> requests_;
  std::vector<Message> messages_;  // of each request
  std::vector<int> indices_;
  std::vector<char> statuses_;
};

template <typename Handle>
PortFactory bind(void* object, const MpiHandles& handles, std::string* error) {
  Functions<Handle> functions;
  const auto find = [&](auto& function, const char* name) {
    void* const address = dlsym(object, name);
    if (!address) *error = std::string(name) + " is not in the MPI library that mpi4py has loaded";
    memcpy(&function, &address, sizeof(function));
  };
  find(functions.send, "MPI_Isend");
  find(functions.receive, "MPI_Irecv");
  find(functions.test_some, "MPI_Testsome");
  find(functions.error_text, "MPI_Error_string");
  find(functions.cancel, "MPI_Cancel");
  find(functions.wait, "MPI_Wait");
  if (!error->empty()) return nullptr;
  return [functions, handles](std::vector<int32_t> peers) {
    return std::make_unique<MpiPort<Handle>>(functions, handles, std::move(peers));
  };
}

}  // namespace

PortFactory bind_mpi(const MpiHandles& handles, std::string* error) {
  // Symbols are looked up in the object and in what it links to. So this is the library that mpi4py
  // calls, whatever other MPI libraries are loaded.
  void* const object = dlopen(handles.module.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (!object) {
    *error = handles.module + " is not loaded";
    return nullptr;
  }
  if (handles.handle_bytes == 4) return bind<int32_t>(object, handles, error);
  if (handles.handle_bytes == 8) return bind<int64_t>(object, handles, error);
  *error = "handles of " + std::to_string(handles.handle_bytes) + " bytes, expected 4 or 8";
  return nullptr;
}

std::vector<std::string> loaded_mpi_libraries() {
  std::vector<std::string> libraries;
#if defined(__linux__)
  std::vector<std::string> names;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        const std::string path = info->dlpi_name ? info->dlpi_name : "";
        if (path.substr(path.find_last_of('/') + 1).rfind("libmpi", 0) == 0) {
          static_cast<std::vector<std::string>*>(data)->push_back(path);
        }
        return 0;
      },
      &names);
  std::set<void*> definitions;  // libraries that only wrap another one resolve to its address
  for (const std::string& name : names) {
    void* const object = dlopen(name.c_str(), RTLD_NOW | RTLD_NOLOAD);
    void* const address = object ? dlsym(object, "MPI_Isend") : nullptr;
    if (object) dlclose(object);
    if (address && definitions.insert(address).second) libraries.push_back(name);
  }
#endif
  return libraries;
}

}  // namespace cgx
