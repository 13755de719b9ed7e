// Host memory that the processes of a node share, mapped for a device.
#ifndef CGX_NCCL_SHARED_MEMORY_H_
#define CGX_NCCL_SHARED_MEMORY_H_

#include <stddef.h>
#include <stdint.h>

#include <string>

namespace cgx {

// Memory that goes by a name, and this process's view of it. The name goes with the object that
// created it, and the view with the object that mapped it, unless it is kept. The memory lives as
// long as it has either.
class SharedMemory {
 public:
  SharedMemory() = default;
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // Creates so many bytes of zeros. Returns what went wrong, or "".
  std::string create(size_t bytes);
  const std::string& name() const { return name_; }  // "" before create()

  // Maps memory of that name for the current device. Returns what went wrong, or "".
  std::string map(const std::string& name, size_t bytes);
  // Where the current device finds it, for good.
  uint8_t* keep();

 private:
  std::string name_;
  void* view_ = nullptr;
  size_t bytes_ = 0;
  uint8_t* on_device_ = nullptr;  // null: the view is not registered
};

}  // namespace cgx

#endif  // CGX_NCCL_SHARED_MEMORY_H_
