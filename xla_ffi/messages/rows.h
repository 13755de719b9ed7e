// Moves whole rows of bytes between the ranks of one group: row r to rank r, or one row to all.
//
// A row travels in segments. Messages read and write only memory that the call owns, because the
// caller's memory is gone once a call has failed. This memory holds one window of segments per peer
// and direction.
#ifndef CGX_MESSAGES_ROWS_H_
#define CGX_MESSAGES_ROWS_H_

#include <stdint.h>

#include <memory>
#include <string>
#include <vector>

#include "messages/call.h"
#include "messages/hello.h"

namespace cgx {

// What one call moves, and between which ranks. The arrays belong to the caller, who keeps them
// until the call is over.
struct RowsSpec {
  bool gathers;       // one row to all ranks, instead of row r to rank r
  const uint8_t* in;  // u8[world, row_bytes]; for a gather u8[row_bytes]
  uint8_t* out;       // u8[world, row_bytes]: row r is from rank r
  int64_t row_bytes;
  int64_t world;
  int64_t rank;
  int tag;  // the first of kCallTags
  Program program = {};
};

class RowsCall : public Call {
 public:
  RowsCall(const RowsSpec& spec, const CallSettings& settings, std::unique_ptr<Port> port,
           BufferPool& buffers);

  bool advance() override;
  bool done() const override { return messages_.none() && open_ == 0; }
  const std::string& error() const override { return messages_.error(); }
  std::string awaited() const override;
  bool greeted(int64_t peer) const override { return peer == spec_.rank || peers_[peer].greeted; }
  void release(BufferPool& buffers) override;

 private:
  struct Peer {
    Hello hello;
    bool greeted = false;
    int64_t sends = 0, receives = 0;  // posted
    int64_t sent = 0, received = 0;   // completed
    std::vector<bool> gone, here;     // per segment: sent, received
  };
  enum Kind { kHelloSend, kHelloReceive, kSend, kReceive };

  void complete(Kind kind, int64_t peer, int64_t segment);
  void pump(int64_t peer);
  bool finished(const Peer& peer) const {
    return peer.greeted && peer.sent == segments_ && peer.received == segments_;
  }
  int64_t begin(int64_t segment) const;
  int64_t bytes(int64_t segment) const { return begin(segment + 1) - begin(segment); }
  uint8_t* staged(const BufferPool::Buffer& buffer, int64_t peer, int64_t segment) const {
    return buffer.data.get() + (peer * window_ + segment % window_) * longest_;
  }

  const RowsSpec spec_;
  const int64_t segments_, longest_, window_;
  const std::unique_ptr<Port> port_;
  Messages messages_;
  BufferPool::Buffer outgoing_, incoming_;  // u8[world, window, longest]
  Hello hello_;
  std::vector<Peer> peers_;
  int64_t open_ = 0;  // peers that are not finished
};

}  // namespace cgx

#endif  // CGX_MESSAGES_ROWS_H_
