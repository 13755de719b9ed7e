// Emulates the other ranks at their worst: their messages arrive late and in any order and hold any
// bytes, and sometimes the network fails.
#ifndef CGX_TESTS_FUZZ_HOSTILE_PORT_H_
#define CGX_TESTS_FUZZ_HOSTILE_PORT_H_

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "fuzz/fuzz.h"
#include "messages/call.h"
#include "messages/hello.h"
#include "messages/port.h"

namespace fuzz {

// How bad they are. Each event happens one time in so many (0: never).
struct Manners {
  int64_t lies;   // a first message differs from what this rank says
  int64_t fails;  // the network fails
};

class HostilePort : public cgx::Port {
 public:
  HostilePort(Random random, Manners manners, int64_t peers)
      : random_(random), manners_(manners), peers_(peers) {}

  std::string send(int64_t peer, int tag, const void* from, int64_t bytes,
                   int64_t ticket) override {
    if (const std::string error = checked(peer, bytes); !error.empty()) return error;
    if (is_hello(tag, bytes)) std::memcpy(static_cast<void*>(&own_), from, sizeof(own_));
    waiting_.push_back({peer, tag, const_cast<void*>(from), bytes, ticket, true});
    return "";
  }
  std::string receive(int64_t peer, int tag, void* to, int64_t bytes, int64_t ticket) override {
    if (const std::string error = checked(peer, bytes); !error.empty()) return error;
    waiting_.push_back({peer, tag, to, bytes, ticket, false});
    return "";
  }
  std::string poll(std::vector<int64_t>* done) override {
    if (fails()) return "the network is gone";
    for (int64_t k = random_.below(4); k > 0 && !waiting_.empty(); --k) {
      std::swap(waiting_[random_.below(static_cast<int64_t>(waiting_.size()))], waiting_.back());
      const Message message = waiting_.back();
      waiting_.pop_back();
      message.sends ? read(message) : write(message);
      done->push_back(message.ticket);
    }
    return "";
  }
  void cancel() override { waiting_.clear(); }

 private:
  struct Message {
    int64_t peer;
    int tag;
    void* data;
    int64_t bytes, ticket;
    bool sends;
  };

  static bool is_hello(int tag, int64_t bytes) {
    return tag % cgx::kCallTags == 0 && bytes == sizeof(cgx::Hello);
  }
  bool fails() { return manners_.fails > 0 && random_.chance(manners_.fails); }
  std::string checked(int64_t peer, int64_t bytes) {
    if (peer < 0 || peer >= peers_) fail("a message to or from rank " + std::to_string(peer));
    if (bytes < 0) fail("a message of " + std::to_string(bytes) + " bytes");
    return fails() ? "no such peer" : "";
  }
  // The memory of a sent message must still exist.
  void read(const Message& message) {
    left_.assign(static_cast<char*>(message.data), message.bytes);
  }
  void write(const Message& message) {
    if (!is_hello(message.tag, message.bytes)) return random_.fill(message.data, message.bytes);
    cgx::Hello hello = own_;
    hello.rank = message.peer;
    if (manners_.lies > 0 && random_.chance(manners_.lies)) {
      if (random_.chance(2)) {
        random_.fill(&hello, sizeof(hello));
      } else {
        random_.fill(reinterpret_cast<char*>(&hello) + random_.below(sizeof(hello)), 1);
      }
    }
    std::memcpy(message.data, &hello, sizeof(hello));
  }

  Random random_;
  const Manners manners_;
  const int64_t peers_;
  cgx::Hello own_ = {};  // what this rank says
  std::vector<Message> waiting_;
  std::string left_;
};

}  // namespace fuzz

#endif  // CGX_TESTS_FUZZ_HOSTILE_PORT_H_
