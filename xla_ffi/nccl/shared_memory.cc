#include "nccl/shared_memory.h"

#include <cuda_runtime_api.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <random>
#include <system_error>

#include "nccl/library.h"

namespace cgx {
namespace {

std::string failed(const std::string& call, int error) {
  return call + ": " + std::generic_category().message(error);
}

}  // namespace

SharedMemory::~SharedMemory() {
  if (!name_.empty()) shm_unlink(name_.c_str());
}

std::string SharedMemory::create(size_t bytes) {
  std::random_device random;
  const std::string name = "/cgx_jax-" + std::to_string(getpid()) + "-" + std::to_string(random()) +
                           "-" + std::to_string(random());
  const int file = shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR, 0600);
  if (file < 0) return failed("shm_open", errno);
  name_ = name;
  // Reserves the pages now: without room, the first write to one would end the process.
  const int error = posix_fallocate(file, 0, static_cast<off_t>(bytes));
  close(file);
  if (error == 0) return "";
  return failed("no " + std::to_string(bytes) + " bytes of shared memory", error) +
         ". Give /dev/shm more room; of a container, with --shm-size";
}

std::string map_shared(const std::string& name, size_t bytes, uint8_t** mapped) {
  const int file = shm_open(name.c_str(), O_RDWR, 0);
  if (file < 0) return failed("shm_open", errno);
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  const int error = errno;
  close(file);
  if (memory == MAP_FAILED) return failed("mmap", error);
  cudaError_t result =
      cudaHostRegister(memory, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
  void* address = nullptr;
  if (result == cudaSuccess) result = cudaHostGetDevicePointer(&address, memory, 0);
  *mapped = static_cast<uint8_t*>(address);
  if (result != cudaSuccess) munmap(memory, bytes);
  return said(result);
}

}  // namespace cgx
