// One call in flight, which the engine drives.
#ifndef CGX_MESSAGES_CALL_H_
#define CGX_MESSAGES_CALL_H_

#include <stdint.h>

#include <string>

#include "messages/buffer_pool.h"

namespace cgx {

constexpr int kCallTags = 3;  // message tags that a call takes: hello and two phases

struct CallSettings {
  int64_t segment_bytes;  // approximate size of a message
  int64_t window;         // segments in flight
};

class Call {
 public:
  virtual ~Call() = default;
  // Does what can be done now. Returns false if that was nothing.
  virtual bool advance() = 0;
  virtual bool done() const = 0;
  // What went wrong; empty if nothing did.
  virtual const std::string& error() const = 0;
  // The peers that the call waits for, as text.
  virtual std::string awaited() const = 0;
  // Whether the group's rank `peer` has said what it is about to do.
  virtual bool greeted(int64_t peer) const = 0;
  // Leaves the call's memory to later calls. Only allowed when done, because before that messages
  // may still write to it.
  virtual void release(BufferPool& buffers) = 0;
};

}  // namespace cgx

#endif  // CGX_MESSAGES_CALL_H_
