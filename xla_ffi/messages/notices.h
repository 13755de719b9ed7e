// What a rank tells all others outside of any call: that it has failed, or that it leaves.
#ifndef CGX_MESSAGES_NOTICES_H_
#define CGX_MESSAGES_NOTICES_H_

#include <stdint.h>

#include <memory>
#include <string>
#include <vector>

#include "messages/port.h"

namespace cgx {

// This rank's notice and those of all others. Each rank sends at most one. Not thread-safe.
class Notices {
 public:
  enum Kind : int64_t { kNone, kFailed, kLeft };

  // `incoming` and `outgoing` reach all `ranks`. No call uses `tag`.
  Notices(std::unique_ptr<Port> incoming, std::unique_ptr<Port> outgoing, int64_t ranks,
          int64_t rank, int tag);
  // Waits a moment until sent messages have left.
  ~Notices();

  // Posts receives for the notices of the others. Must come before poll().
  void listen();
  void send(Kind kind, const std::string& text);
  // Returns whether another notice has arrived.
  bool poll();
  Kind of(int64_t rank) const { return heard_[rank] ? received_[rank]->kind : kNone; }
  std::string text(int64_t rank) const;

 private:
  struct Notice {
    Kind kind = kNone;
    char text[2040] = {};
  };

  const std::unique_ptr<Port> incoming_, outgoing_;
  const int64_t rank_;
  const int tag_;
  // Messages in flight write to and read from these.
  std::vector<std::unique_ptr<Notice>> received_;
  std::unique_ptr<Notice> sent_;
  std::vector<bool> heard_;
  int64_t leaving_ = 0;  // messages
  std::vector<int64_t> finished_;
};

}  // namespace cgx

#endif  // CGX_MESSAGES_NOTICES_H_
