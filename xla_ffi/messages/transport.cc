#include "messages/transport.h"

namespace cgx {

Transport::Transport(Port& port, Collective collective, int64_t world, const Layout& layout,
                     const Segments& segments, int64_t rank, int tag, int64_t ahead,
                     const Hello& hello, uint8_t* sent, uint8_t* received)
    : messages_(port, tag),
      collective_(collective),
      world_(world),
      layout_(layout),
      segments_(segments),
      rank_(rank),
      ahead_(ahead),
      hello_(hello),
      sent_(sent),
      received_(received),
      peers_(world) {
  const bool scatters = has(collective, Phase::kScatter);
  const int64_t count = segments.count();
  for (auto& missing : missing_) missing.assign(count, 0);
  for (int64_t p = 0; p < world; ++p) {
    if (p == rank) continue;
    for (int64_t s = 0; s < count; ++s) {
      missing_[0][s] += scatters && bytes(rank, s) > 0;
      missing_[1][s] += bytes(p, s) > 0;
    }
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
  messages_.post(kind, peer, segment, at, bytes);
  peers_[peer].sending += kind == kHelloSend || kind == kScatterSend || kind == kGatherSend;
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
  return messages_.poll([this](int kind, int64_t p, int64_t segment) {
    complete(static_cast<Kind>(kind), p, segment);
  });
}

void Transport::complete(Kind kind, int64_t p, int64_t segment) {
  Peer& peer = peers_[p];
  switch (kind) {
    case kHelloReceive:
      messages_.fail(disagreement(p, peer.hello, hello_));
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
  return listed(world_, [this](int64_t p) -> std::string {
    const Peer& peer = peers_[p];
    const int64_t count = segments_.count();
    if (p == rank_) return "";
    if (!peer.greeted) return "not heard from";
    if (peer.scattered == count && peer.gathered == count) {
      return peer.sending > 0 ? "does not take what it is sent" : "";
    }
    const bool scatters = has(collective_, Phase::kScatter);
    return (scatters ? std::to_string(peer.scattered) + " and " : "") +
           std::to_string(peer.gathered) + " of " + std::to_string(count) + " segments received";
  });
}

}  // namespace cgx
