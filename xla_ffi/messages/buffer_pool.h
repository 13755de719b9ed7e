// Memory that calls leave to later calls.
#ifndef CGX_MESSAGES_BUFFER_POOL_H_
#define CGX_MESSAGES_BUFFER_POOL_H_

#include <stdint.h>

#include <memory>
#include <vector>

namespace cgx {

// Keeps memory from call to call, because fresh pages cost more than the encoding. Buffers start at
// a cache line.
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

#endif  // CGX_MESSAGES_BUFFER_POOL_H_
