// Host memory that the processes of a node share, mapped for their devices.
#ifndef CGX_NCCL_SHARED_MEMORY_H_
#define CGX_NCCL_SHARED_MEMORY_H_

#include <stddef.h>
#include <stdint.h>

#include <string>

namespace cgx {

// Memory under a name by which other processes can map it. The name goes with this object; the
// memory lives as long as a process has it mapped.
class SharedMemory {
 public:
  SharedMemory() = default;
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // Creates so many bytes of zeros. Returns what went wrong, or "".
  std::string create(size_t bytes);
  const std::string& name() const { return name_; }  // "" before create()

 private:
  std::string name_;
};

// Maps memory of that name into this process, for good, and for its devices. Returns what went
// wrong, or "". `mapped` is then its address on the current device.
std::string map_shared(const std::string& name, size_t bytes, uint8_t** mapped);

}  // namespace cgx

#endif  // CGX_NCCL_SHARED_MEMORY_H_
