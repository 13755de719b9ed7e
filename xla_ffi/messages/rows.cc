#include "messages/rows.h"

#include <string.h>

#include <algorithm>
#include <utility>

#include "format/wire_format.h"

namespace cgx {
namespace {

// A message's ticket holds its kind, its peer and its segment.
constexpr int64_t kSegmentBits = 32, kPeerBits = 24;

// An empty row may have no memory at all.
void copy(uint8_t* to, const uint8_t* from, int64_t bytes) {
  if (bytes > 0) memcpy(to, from, bytes);
}

Hello hello(const RowsSpec& spec, int64_t segments) {
  Fingerprint plan;
  plan.add(spec.gathers ? 'g' : 's');
  plan.add(spec.world);
  return {kHelloVersion, plan.value(), spec.row_bytes, segments, spec.rank, spec.program};
}

}  // namespace

RowsCall::RowsCall(const RowsSpec& spec, const CallSettings& settings, std::unique_ptr<Port> port,
                   BufferPool& buffers)
    : spec_(spec),
      segments_((spec.row_bytes + settings.segment_bytes - 1) / settings.segment_bytes),
      longest_(segments_ == 0 ? 0 : (spec.row_bytes + segments_ - 1) / segments_),
      window_(std::min(settings.window, std::max<int64_t>(segments_, 1))),
      port_(std::move(port)),
      outgoing_(buffers.take(spec.world * window_ * longest_)),
      incoming_(buffers.take(spec.world * window_ * longest_)),
      hello_(hello(spec, segments_)),
      peers_(spec.world),
      open_(spec.world - 1) {
  const int64_t own = spec.rank * spec.row_bytes;
  copy(spec.out + own, spec.in + (spec.gathers ? 0 : own), spec.row_bytes);
  // Each rank starts with the next one, so that not all of them send to the same rank at once.
  for (int64_t d = 1; d < spec.world; ++d) {
    const int64_t p = (spec.rank + d) % spec.world;
    peers_[p].gone.assign(segments_, false);
    peers_[p].here.assign(segments_, false);
    message(kHelloReceive, p, 0, &peers_[p].hello, sizeof(Hello));
    message(kHelloSend, p, 0, &hello_, sizeof(Hello));
    pump(p);
  }
}

int64_t RowsCall::begin(int64_t segment) const {
  return chunk_cut(segment, spec_.row_bytes, segments_);
}

void RowsCall::message(Kind kind, int64_t peer, int64_t segment, void* at, int64_t bytes) {
  if (!error_.empty()) return;
  const int64_t ticket =
      (int64_t{kind} << (kPeerBits + kSegmentBits)) | (peer << kSegmentBits) | segment;
  const int tag = spec_.tag + (kind == kSend || kind == kReceive);
  error_ = kind == kSend || kind == kHelloSend ? port_->send(peer, tag, at, bytes, ticket)
                                               : port_->receive(peer, tag, at, bytes, ticket);
  if (error_.empty()) ++pending_;
}

// Posts for one peer what can be posted now, segment by segment, because messages with one tag
// match in the order of posting. A segment needs the place of the segment one window before it.
void RowsCall::pump(int64_t p) {
  Peer& peer = peers_[p];
  const auto next = [&](int64_t s, const std::vector<bool>& complete) {
    return error_.empty() && s < segments_ && (s < window_ || complete[s - window_]);
  };
  for (int64_t& s = peer.receives; next(s, peer.here); ++s) {
    message(kReceive, p, s, staged(incoming_, p, s), bytes(s));
  }
  if (!peer.greeted) return;
  const uint8_t* const row = spec_.in + (spec_.gathers ? 0 : p * spec_.row_bytes);
  for (int64_t& s = peer.sends; next(s, peer.gone); ++s) {
    uint8_t* const from = staged(outgoing_, p, s);
    copy(from, row + begin(s), bytes(s));
    message(kSend, p, s, from, bytes(s));
  }
}

bool RowsCall::advance() {
  finished_.clear();
  if (error_.empty()) error_ = port_->poll(&finished_);
  for (const int64_t ticket : finished_) complete(ticket);
  return !finished_.empty() || !error_.empty();
}

void RowsCall::complete(int64_t ticket) {
  const int64_t s = ticket & ((int64_t{1} << kSegmentBits) - 1);
  const int64_t p = (ticket >> kSegmentBits) & ((int64_t{1} << kPeerBits) - 1);
  Peer& peer = peers_[p];
  --pending_;
  switch (static_cast<Kind>(ticket >> (kPeerBits + kSegmentBits))) {
    case kHelloSend:
      return;
    case kHelloReceive:
      if (error_.empty()) error_ = disagreement(p, peer.hello, hello_);
      peer.greeted = true;
      break;
    case kSend:
      peer.gone[s] = true;
      ++peer.sent;
      break;
    case kReceive:
      copy(spec_.out + p * spec_.row_bytes + begin(s), staged(incoming_, p, s), bytes(s));
      peer.here[s] = true;
      ++peer.received;
      break;
  }
  if (finished(peer)) --open_;
  pump(p);
}

std::string RowsCall::awaited() const {
  std::string text;
  for (int64_t p = 0; p < spec_.world; ++p) {
    const Peer& peer = peers_[p];
    std::string what;
    if (p == spec_.rank) continue;
    if (!peer.greeted) {
      what = "not heard from";
    } else if (peer.received < segments_) {
      what =
          std::to_string(peer.received) + " of " + std::to_string(segments_) + " segments received";
    } else if (peer.sent < segments_) {
      what = "does not take what it is sent";
    } else {
      continue;
    }
    text += (text.empty() ? "rank " : ", rank ") + std::to_string(p) + " (" + what + ")";
  }
  return text;
}

void RowsCall::release(BufferPool& buffers) {
  buffers.give_back(std::move(outgoing_));
  buffers.give_back(std::move(incoming_));
}

}  // namespace cgx
