// What the engine moves: one call in flight.
#ifndef CGX_MPI_CALL_H_
#define CGX_MPI_CALL_H_

#include <stdint.h>

#include <string>

#include "mpi/buffer_pool.h"

namespace cgx {

constexpr int kCallTags = 3;  // message tags that a call takes: hello and two phases

struct CallSettings {
  int64_t segment_bytes;  // of a message, about
  int64_t window;         // segments in flight
};

class Call {
 public:
  virtual ~Call() = default;
  // Does what can be done now; false when that was nothing.
  virtual bool advance() = 0;
  virtual bool done() const = 0;
  // What went wrong; empty when nothing did.
  virtual const std::string& error() const = 0;
  // Peers from which something is awaited, as text.
  virtual std::string awaited() const = 0;
  // Whether the group's rank `peer` has said what it is about to do.
  virtual bool greeted(int64_t peer) const = 0;
  // Memory for the next call; only when done, since messages may still write to it otherwise.
  virtual void release(BufferPool& buffers) = 0;
};

}  // namespace cgx

#endif  // CGX_MPI_CALL_H_
