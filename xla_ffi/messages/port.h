// What the engine needs of a transport, such as MPI or a test's stand-in: one file that implements
// these two types.
#ifndef CGX_MESSAGES_PORT_H_
#define CGX_MESSAGES_PORT_H_

#include <stdint.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace cgx {

// Nonblocking messages between the ranks of one group, one port per call. Not thread-safe.
// Functions return what went wrong, empty if nothing did. Messages between two ranks with the same
// tag arrive in the order of posting.
class Port {
 public:
  virtual ~Port() = default;
  virtual std::string send(int64_t peer, int tag, const void* from, int64_t bytes,
                           int64_t ticket) = 0;
  virtual std::string receive(int64_t peer, int tag, void* to, int64_t bytes, int64_t ticket) = 0;
  // Appends the tickets of the messages that have completed since the last poll.
  virtual std::string poll(std::vector<int64_t>* done) = 0;
  // Cancels receives that no message has matched. After that, nothing is written to their memory.
  virtual void cancel() = 0;
};

// Makes a port; `peers[r]` is the transport's rank of the group's rank r.
using PortFactory = std::function<std::unique_ptr<Port>(std::vector<int32_t> peers)>;

}  // namespace cgx

#endif  // CGX_MESSAGES_PORT_H_
