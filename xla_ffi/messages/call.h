// One call in flight, which the engine drives, and its messages.
#ifndef CGX_MESSAGES_CALL_H_
#define CGX_MESSAGES_CALL_H_

#include <stdint.h>

#include <string>
#include <utility>
#include <vector>

#include "messages/buffer_pool.h"
#include "messages/port.h"

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

// The messages of a call. Kinds come in pairs with a tag of their own: an even kind is sent, and
// the peer receives it as the odd kind after it.
class Messages {
 public:
  // `tag` is the first of kCallTags.
  Messages(Port& port, int tag) : port_(port), tag_(tag) {}

  // Posts a message, unless something has failed.
  void post(int kind, int64_t peer, int64_t segment, void* at, int64_t bytes) {
    if (!error_.empty()) return;
    const int64_t ticket =
        (int64_t{kind} << (kPeerBits + kSegmentBits)) | (peer << kSegmentBits) | segment;
    const int tag = tag_ + kind / 2;
    error_ = kind % 2 == 0 ? port_.send(peer, tag, at, bytes, ticket)
                           : port_.receive(peer, tag, at, bytes, ticket);
    pending_ += error_.empty();
  }
  // Calls f(kind, peer, segment) for each message that has completed. Returns whether any has.
  template <typename F>
  bool poll(F f) {
    finished_.clear();
    if (error_.empty()) error_ = port_.poll(&finished_);
    pending_ -= static_cast<int64_t>(finished_.size());
    for (const int64_t ticket : finished_) {
      f(static_cast<int>(ticket >> (kPeerBits + kSegmentBits)), ticket >> kSegmentBits & kPeers,
        ticket & kSegments);
    }
    return !finished_.empty();
  }

  void fail(std::string error) {
    if (error_.empty()) error_ = std::move(error);
  }
  // Whether none is in flight.
  bool none() const { return pending_ == 0; }
  const std::string& error() const { return error_; }

 private:
  static constexpr int kSegmentBits = 32, kPeerBits = 24;
  static constexpr int64_t kSegments = (int64_t{1} << kSegmentBits) - 1;
  static constexpr int64_t kPeers = (int64_t{1} << kPeerBits) - 1;

  Port& port_;
  const int tag_;
  int64_t pending_ = 0;
  std::string error_;  // the first
  std::vector<int64_t> finished_;
};

// Lists the ranks that `what(rank)` says something of; "" for none.
template <typename What>
std::string listed(int64_t world, What what) {
  std::string text;
  for (int64_t p = 0; p < world; ++p) {
    const std::string said = what(p);
    if (said.empty()) continue;
    text += (text.empty() ? "rank " : ", rank ") + std::to_string(p) + " (" + said + ")";
  }
  return text;
}

}  // namespace cgx

#endif  // CGX_MESSAGES_CALL_H_
