// Moves segments as nonblocking messages between the ranks of one group.
#ifndef CGX_MESSAGES_TRANSPORT_H_
#define CGX_MESSAGES_TRANSPORT_H_

#include <stdint.h>

#include <string>
#include <vector>

#include "messages/call.h"
#include "messages/hello.h"
#include "schedule/schedule.h"
#include "schedule/segments.h"

namespace cgx {

class Transport {
 public:
  // `sent` and `received` are u8[world, chunk_bytes]. The chunks to send lie in their rows of
  // `sent`, and the gathered chunks then replace them. Row `rank` is what this rank sends to all.
  // Without the kScatter phase nothing is received into `received`. The layout of a gather-sum has
  // one chunk, and each rank sends its own version of it.
  Transport(Port& port, Collective collective, int64_t world, const Layout& layout,
            const Segments& segments, int64_t rank, int tag, int64_t ahead, const Hello& hello,
            uint8_t* sent, uint8_t* received);

  void post(Phase phase, int64_t segment);
  bool arrived(Phase phase, int64_t segment) const {
    return missing_[static_cast<int>(phase)][segment] == 0;
  }
  // Lets messages progress. Returns whether any completed.
  bool poll();
  // Whether no posted message is pending.
  bool drained() const { return messages_.none(); }
  const std::string& error() const { return messages_.error(); }
  // The peers that the call waits for, as text.
  std::string awaited() const;
  bool greeted(int64_t peer) const { return peer == rank_ || peers_[peer].greeted; }

 private:
  struct Peer {
    Hello hello;
    bool greeted = false;
    int64_t scatter_sends = 0, gather_sends = 0;        // posted
    int64_t scatter_receives = 0, gather_receives = 0;  // posted
    int64_t scattered = 0, gathered = 0;                // received
    int64_t sending = 0;                                // posted and not yet gone
    std::vector<bool> sent;                             // scatter segments that have left
  };
  enum Kind {
    kHelloSend,
    kHelloReceive,
    kScatterSend,
    kScatterReceive,
    kGatherSend,
    kGatherReceive
  };

  void pump(int64_t peer);
  void complete(Kind kind, int64_t peer, int64_t segment);
  void message(Kind kind, int64_t peer, int64_t segment, void* at, int64_t bytes);
  // The chunk that a rank sends to all.
  int64_t chunk(int64_t rank) const { return collective_ == Collective::kGatherSum ? 0 : rank; }
  int64_t bytes(int64_t rank, int64_t segment) const {
    return segments_.bytes(chunk(rank), segment);
  }
  // Where the segment of `rank`'s chunk lies in a row of `payload`.
  uint8_t* place(uint8_t* payload, int64_t row, int64_t rank, int64_t segment) const {
    return payload + row * layout_.chunk_bytes + segments_.begin(chunk(rank), segment) -
           layout_.begin[chunk(rank)];
  }

  Messages messages_;
  const Collective collective_;
  const int64_t world_;
  const Layout layout_;
  const Segments& segments_;
  const int64_t rank_;
  const int64_t ahead_;  // receives posted early, per peer and phase
  Hello hello_;
  uint8_t* const sent_;
  uint8_t* const received_;
  std::vector<Peer> peers_;
  std::vector<int64_t> missing_[2];
  int64_t posted_[2] = {0, 0};
};

}  // namespace cgx

#endif  // CGX_MESSAGES_TRANSPORT_H_
