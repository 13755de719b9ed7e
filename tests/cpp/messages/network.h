// MPI's stand-in: messages between virtual ranks, delayed at random.
#ifndef CGX_TESTS_MESSAGES_NETWORK_H_
#define CGX_TESTS_MESSAGES_NETWORK_H_

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "messages/port.h"

namespace {

// Messages wait until they are picked at random. Their bytes are read and written only at that
// moment, so memory that is reused too early shows.
class Network {
 public:
  struct End {
    void* data;
    int64_t bytes, ticket;
    std::vector<int64_t>* done;
  };
  explicit Network(uint32_t seed) : rng_(seed) {}

  void put(bool sends, int64_t from, int64_t to, int tag, End end) {
    auto& channel = channels_[{from, to, tag}];
    (sends ? channel.first : channel.second).push_back(end);
  }
  bool deliver() {
    std::vector<std::pair<std::deque<End>, std::deque<End>>*> ready;
    for (auto& [key, channel] : channels_) {
      if (!channel.first.empty() && !channel.second.empty()) ready.push_back(&channel);
    }
    if (ready.empty()) return false;
    auto& [sends, receives] = *ready[rng_() % ready.size()];
    const End send = sends.front(), receive = receives.front();
    sends.pop_front(), receives.pop_front();
    if (send.bytes != receive.bytes) mismatched = true;
    std::memcpy(receive.data, send.data, std::min(send.bytes, receive.bytes));
    send.done->push_back(send.ticket);
    receive.done->push_back(receive.ticket);
    return true;
  }
  bool empty() const {
    for (const auto& [key, channel] : channels_) {
      if (!channel.first.empty() || !channel.second.empty()) return false;
    }
    return true;
  }
  // Forgets the receives of a rank.
  void cancel(int64_t rank) {
    for (auto& [key, channel] : channels_) {
      if (std::get<1>(key) == rank) channel.second.clear();
    }
  }
  // True one time in `n`.
  bool chance(uint32_t n) { return rng_() % n == 0; }
  bool mismatched = false;

 private:
  std::mt19937 rng_;
  std::map<std::tuple<int64_t, int64_t, int>, std::pair<std::deque<End>, std::deque<End>>>
      channels_;
};

class FakePort : public cgx::Port {
 public:
  FakePort(Network& network, int64_t rank) : network_(network), rank_(rank) {}
  std::string send(int64_t peer, int tag, const void* from, int64_t bytes,
                   int64_t ticket) override {
    network_.put(true, rank_, peer, tag, {const_cast<void*>(from), bytes, ticket, &done_});
    return "";
  }
  std::string receive(int64_t peer, int tag, void* to, int64_t bytes, int64_t ticket) override {
    network_.put(false, peer, rank_, tag, {to, bytes, ticket, &done_});
    return "";
  }
  // Like MPI, it may report messages later than they arrive, and in a different order.
  std::string poll(std::vector<int64_t>* done) override {
    for (size_t i = 0; i < done_.size();) {
      if (network_.chance(4)) {
        ++i;
        continue;
      }
      done->push_back(done_[i]);
      done_[i] = done_.back();
      done_.pop_back();
    }
    return "";
  }
  void cancel() override { network_.cancel(rank_); }

 private:
  Network& network_;
  const int64_t rank_;
  std::vector<int64_t> done_;
};

// Peers that take everything and say nothing.
class SilentPort : public cgx::Port {
 public:
  std::string send(int64_t, int, const void*, int64_t, int64_t ticket) override {
    sent_.push_back(ticket);
    return "";
  }
  std::string receive(int64_t, int, void*, int64_t, int64_t) override { return ""; }
  std::string poll(std::vector<int64_t>* done) override {
    done->insert(done->end(), sent_.begin(), sent_.end());
    sent_.clear();
    return "";
  }
  void cancel() override {}

 private:
  std::vector<int64_t> sent_;
};

// The factory of such ports.
template <typename Port>
[[maybe_unused]] std::unique_ptr<cgx::Port> port_of(std::vector<int32_t>) {
  return std::make_unique<Port>();
}

}  // namespace

#endif  // CGX_TESTS_MESSAGES_NETWORK_H_
