#include "nccl/shared_memory.h"

#include <cuda_runtime_api.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <random>
#include <system_error>
#include <utility>

#include "nccl/library.h"

namespace cgx {
namespace {

std::string failed(const std::string& call, int error) {
  return call + ": " + std::generic_category().message(error);
}

}  // namespace

SharedMemory::~SharedMemory() {
  if (!name_.empty()) shm_unlink(name_.c_str());
  if (on_device_) cudaHostUnregister(view_);
  if (view_) munmap(view_, bytes_);
}

std::string SharedMemory::create(size_t bytes) {
  std::random_device random;
  const std::string name = "/cgx_jax-" + std::to_string(getpid()) + "-" + std::to_string(random()) +
                           "-" + std::to_string(random());
  const int file = shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR, 0600);
  if (file < 0) return failed("shm_open", errno);
  name_ = name;
  // Reserves the pages now: without room, the first write to one would end the process.
  int error;
  while ((error = posix_fallocate(file, 0, static_cast<off_t>(bytes))) == EINTR) {
  }
  close(file);
  if (error == 0) return "";
  return failed("no " + std::to_string(bytes) + " bytes of shared memory", error) +
         ". Give /dev/shm more room; of a container, with --shm-size";
}

std::string SharedMemory::map(const std::string& name, size_t bytes) {
  const int file = shm_open(name.c_str(), O_RDWR, 0);
  if (file < 0) return failed("shm_open", errno);
  void* const view = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  const int error = errno;
  close(file);
  if (view == MAP_FAILED) return failed("mmap", error);
  view_ = view, bytes_ = bytes;
  void* on_device = nullptr;
  cudaError_t result = cudaHostRegister(view, bytes, cudaHostRegisterMapped);
  if (result == cudaSuccess) {
    result = cudaHostGetDevicePointer(&on_device, view, 0);
    if (result != cudaSuccess) cudaHostUnregister(view);
  }
  on_device_ = static_cast<uint8_t*>(on_device);
  return said(result);
}

uint8_t* SharedMemory::keep() {
  view_ = nullptr;
  return std::exchange(on_device_, nullptr);
}

}  // namespace cgx
