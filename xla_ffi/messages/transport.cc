#include "messages/transport.h"

namespace cgx {
namespace {

// A message's ticket holds its kind, its peer and its segment.
constexpr int64_t kSegmentBits = 32, kPeerBits = 24;

}  // namespace

Transport::Transport(Port& port, Collective collective, int64_t world, const Layout& layout,
                     const Segments& segments, int64_t rank, int tag, int64_t ahead,
                     const Hello& hello, uint8_t* sent, uint8_t* received)
    : port_(port),
      collective_(collective),
      world_(world),
      layout_(layout),
      segments_(segments),
      rank_(rank),
      tag_(tag),
      ahead_(ahead),
      hello_(hello),
      sent_(sent),
      received_(received),
      peers_(world) {
  for (auto& missing : missing_) missing.assign(segments.count(), 0);
  const bool scatters = has(collective, Phase::kScatter);
  const int64_t count = segments.count();
  for (int64_t s = 0; s < count; ++s) {
    for (int64_t p = 0; p < world; ++p) {
      if (p == rank) continue;
      missing_[0][s] += scatters && bytes(rank, s) > 0;
      missing_[1][s] += bytes(p, s) > 0;
    }
  }
  for (int64_t p = 0; p < world; ++p) {
    if (p == rank) continue;
    Peer& peer = peers_[p];
    peer.sent.assign(count, !scatters);
    // A phase that is left out counts as complete.
    if (!scatters) peer.scatter_sends = peer.scatter_receives = peer.scattered = count;
    message(kHelloReceive, p, 0, &peer.hello, sizeof(Hello));
    pump(p);
  }
  for (int64_t p = 0; p < world; ++p) {
    if (p != rank) message(kHelloSend, p, 0, &hello_, sizeof(Hello));
  }
}

void Transport::message(Kind kind, int64_t peer, int64_t segment, void* at, int64_t bytes) {
  if (!error_.empty()) return;
  const int64_t ticket =
      (int64_t{kind} << (kPeerBits + kSegmentBits)) | (peer << kSegmentBits) | segment;
  const bool sends = kind == kHelloSend || kind == kScatterSend || kind == kGatherSend;
  error_ = sends ? port_.send(peer, tag_ + kind / 2, at, bytes, ticket)
                 : port_.receive(peer, tag_ + kind / 2, at, bytes, ticket);
  if (!error_.empty()) return;
  ++pending_;
  peers_[peer].sending += sends;
}

void Transport::post(Phase phase, int64_t segment) {
  posted_[static_cast<int>(phase)] = segment + 1;
  // Each rank starts with the next one, so that not all of them send to the same rank at once.
  for (int64_t d = 1; d < world_; ++d) pump((rank_ + d) % world_);
}

// Posts for one peer what can be posted now: receives first. Empty segments send no message.
void Transport::pump(int64_t p) {
  Peer& peer = peers_[p];
  const int64_t count = segments_.count();
  for (int64_t& s = peer.scatter_receives; s < count && s < peer.scattered + ahead_; ++s) {
    const int64_t size = bytes(rank_, s);
    if (size == 0) {
      ++peer.scattered;
    } else {
      message(kScatterReceive, p, s, place(received_, p, rank_, s), size);
    }
  }
  // A gathered segment takes the place of the scattered one once that has been sent.
  for (int64_t& s = peer.gather_receives; s < count && s < peer.gathered + ahead_ && peer.sent[s];
       ++s) {
    const int64_t size = bytes(p, s);
    if (size == 0) {
      ++peer.gathered;
    } else {
      message(kGatherReceive, p, s, place(sent_, p, p, s), size);
    }
  }
  if (!peer.greeted) return;
  for (int64_t& s = peer.gather_sends; s < posted_[1]; ++s) {
    const int64_t size = bytes(rank_, s);
    if (size > 0) message(kGatherSend, p, s, place(sent_, rank_, rank_, s), size);
  }
  for (int64_t& s = peer.scatter_sends; s < posted_[0]; ++s) {
    const int64_t size = bytes(p, s);
    if (size == 0) {
      peer.sent[s] = true;
    } else {
      message(kScatterSend, p, s, place(sent_, p, p, s), size);
    }
  }
}

bool Transport::poll() {
  finished_.clear();
  if (error_.empty()) error_ = port_.poll(&finished_);
  for (int64_t ticket : finished_) complete(ticket);
  return !finished_.empty();
}

void Transport::complete(int64_t ticket) {
  const int64_t segment = ticket & ((int64_t{1} << kSegmentBits) - 1);
  const int64_t p = (ticket >> kSegmentBits) & ((int64_t{1} << kPeerBits) - 1);
  Peer& peer = peers_[p];
  --pending_;
  switch (static_cast<Kind>(ticket >> (kPeerBits + kSegmentBits))) {
    case kHelloReceive:
      if (error_.empty()) error_ = disagreement(p, peer.hello, hello_);
      peer.greeted = true;
      break;
    case kScatterReceive:
      ++peer.scattered;
      --missing_[0][segment];
      break;
    case kGatherReceive:
      ++peer.gathered;
      --missing_[1][segment];
      break;
    case kScatterSend:
      --peer.sending;
      peer.sent[segment] = true;
      break;
    case kHelloSend:
    case kGatherSend:
      --peer.sending;
      return;
  }
  pump(p);
}

std::string Transport::awaited() const {
  std::string text;
  const std::string count = std::to_string(segments_.count());
  for (int64_t p = 0; p < world_; ++p) {
    const Peer& peer = peers_[p];
    std::string what;
    if (p == rank_) continue;
    if (!peer.greeted) {
      what = "not heard from";
    } else if (peer.scattered < segments_.count() || peer.gathered < segments_.count()) {
      if (has(collective_, Phase::kScatter)) what = std::to_string(peer.scattered) + " and ";
      what += std::to_string(peer.gathered) + " of " + count + " segments received";
    } else if (peer.sending > 0) {
      what = "does not take what it is sent";
    } else {
      continue;
    }
    text += (text.empty() ? "rank " : ", rank ") + std::to_string(p) + " (" + what + ")";
  }
  return text;
}

}  // namespace cgx
