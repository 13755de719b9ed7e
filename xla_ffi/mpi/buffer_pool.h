// Memory that calls leave to the calls after them.
#ifndef CGX_MPI_BUFFER_POOL_H_
#define CGX_MPI_BUFFER_POOL_H_

#include <stdint.h>

#include <memory>
#include <vector>

namespace cgx {

// Memory at a cache line's start, kept from call to call: fresh pages cost more than the encoding.
class BufferPool {
 public:
  struct Free {
    void operator()(uint8_t* p) const;
  };
  struct Buffer {
    std::unique_ptr<uint8_t, Free> data;
    int64_t bytes = 0;
  };
  Buffer take(int64_t bytes);
  void give_back(Buffer buffer);

 private:
  std::vector<Buffer> free_;
};

}  // namespace cgx

#endif  // CGX_MPI_BUFFER_POOL_H_
