#include "messages/rows.h"

#include <string.h>

#include <algorithm>
#include <utility>

#include "format/wire_format.h"

namespace cgx {
namespace {

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
      messages_(*port_, spec.tag),
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
    messages_.post(kHelloReceive, p, 0, &peers_[p].hello, sizeof(Hello));
    messages_.post(kHelloSend, p, 0, &hello_, sizeof(Hello));
    pump(p);
  }
}

int64_t RowsCall::begin(int64_t segment) const {
  return chunk_cut(segment, spec_.row_bytes, segments_);
}

// Posts for one peer what can be posted now, segment by segment, because messages with one tag
// match in the order of posting. A segment needs the place of the segment one window before it.
void RowsCall::pump(int64_t p) {
  Peer& peer = peers_[p];
  const auto next = [&](int64_t s, const std::vector<bool>& complete) {
    return error().empty() && s < segments_ && (s < window_ || complete[s - window_]);
  };
  for (int64_t& s = peer.receives; next(s, peer.here); ++s) {
    messages_.post(kReceive, p, s, staged(incoming_, p, s), bytes(s));
  }
  if (!peer.greeted) return;
  const uint8_t* const row = spec_.in + (spec_.gathers ? 0 : p * spec_.row_bytes);
  for (int64_t& s = peer.sends; next(s, peer.gone); ++s) {
    uint8_t* const from = staged(outgoing_, p, s);
    copy(from, row + begin(s), bytes(s));
    messages_.post(kSend, p, s, from, bytes(s));
  }
}

bool RowsCall::advance() {
  const bool moved = messages_.poll(
      [this](int kind, int64_t p, int64_t s) { complete(static_cast<Kind>(kind), p, s); });
  return moved || !error().empty();
}

void RowsCall::complete(Kind kind, int64_t p, int64_t s) {
  Peer& peer = peers_[p];
  switch (kind) {
    case kHelloSend:
      return;
    case kHelloReceive:
      messages_.fail(disagreement(p, peer.hello, hello_));
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
  return listed(spec_.world, [this](int64_t p) -> std::string {
    const Peer& peer = peers_[p];
    if (p == spec_.rank || finished(peer)) return "";
    if (!peer.greeted) return "not heard from";
    if (peer.received == segments_) return "does not take what it is sent";
    return std::to_string(peer.received) + " of " + std::to_string(segments_) +
           " segments received";
  });
}

void RowsCall::release(BufferPool& buffers) {
  buffers.give_back(std::move(outgoing_));
  buffers.give_back(std::move(incoming_));
}

}  // namespace cgx
