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

#include "messages/call.h"
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

// Runs calls on virtual ranks. Every rank starts all of them in its own order, by start(rank, call,
// the rank's memory). Then messages and ranks advance at random, and over(call) sees each call that
// is done. Returns what goes wrong, or "".
template <typename Start, typename Over>
[[maybe_unused]] std::string run_in_any_order(Network& network, int64_t world, size_t calls,
                                              std::mt19937& rng, Start start, Over over) {
  std::vector<cgx::BufferPool> buffers(world);
  std::vector<std::vector<std::unique_ptr<cgx::Call>>> active(world);
  std::vector<std::vector<size_t>> waiting(world);
  for (auto& order : waiting) {
    for (size_t j = 0; j < calls; ++j) order.push_back(j);
    std::shuffle(order.begin(), order.end(), rng);
  }
  int64_t idle = 0, left = world * static_cast<int64_t>(calls);
  while (left > 0 && idle < 100000) {
    ++idle;
    if (rng() % 2 && network.deliver()) idle = 0;
    const int64_t r = rng() % world;
    if (!waiting[r].empty() && rng() % 3 == 0) {
      active[r].push_back(start(r, waiting[r].back(), buffers[r]));
      waiting[r].pop_back();
    }
    for (size_t i = 0; i < active[r].size(); ++i) {
      cgx::Call& call = *active[r][i];
      if (call.advance()) idle = 0;
      if (!call.error().empty()) return call.error();
      if (!call.done()) continue;
      over(call);
      call.release(buffers[r]);
      active[r].erase(active[r].begin() + i--);
      --left;
    }
  }
  if (left > 0) return std::to_string(left) + " calls never end";
  return network.empty() && !network.mismatched ? "" : "a message is not sent and received once";
}

// Lets messages and calls advance until all calls are done. Returns whether they are.
template <typename Calls>
[[maybe_unused]] bool finish(Network& network, const Calls& calls) {
  const auto done = [](const auto& call) { return call->done(); };
  for (int i = 0; i < 1000000 && !std::all_of(calls.begin(), calls.end(), done); ++i) {
    network.deliver();
    for (auto& call : calls) call->advance();
  }
  return std::all_of(calls.begin(), calls.end(), done);
}

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
