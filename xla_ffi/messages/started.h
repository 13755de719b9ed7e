// Calls that one program starts and a later one finishes.
#ifndef CGX_MESSAGES_STARTED_H_
#define CGX_MESSAGES_STARTED_H_

#include <stdint.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "messages/buffer_pool.h"

namespace cgx {

// A call with memory of its own for its operands and results, since a program's memory ends with
// the program.
class StartedCall {
 public:
  // `sizes` are the bytes of arrays, each of which begins at a cache line.
  StartedCall(BufferPool& pool, const std::vector<int64_t>& sizes);

  char* array(size_t i) const { return reinterpret_cast<char*>(memory.data.get()) + starts_[i]; }

  // Receives what went wrong; empty if nothing did.
  using Then = std::function<void(const std::string& error)>;
  // Calls `then` once the call is over: at once, or on the thread that says so. The results are
  // then readable until the last owner lets go of this object.
  void when_over(Then then);
  void is_over(const std::string& error);

  BufferPool::Buffer memory;
  // The arrays that hold the results, and their bytes, in the order of the call's results.
  std::vector<std::pair<const char*, int64_t>> results;

 private:
  std::vector<int64_t> starts_;
  std::mutex mutex_;
  bool over_ = false;
  std::string error_;
  std::vector<Then> then_;
};

// The calls that this process has started. Thread-safe, and lives as long as its calls.
class StartedCalls {
 public:
  // Calls of one ticket have different numbers. No ticket is 0.
  struct Id {
    uint64_t ticket;
    int64_t number;
    bool operator==(const Id& other) const {
      return ticket == other.ticket && number == other.number;
    }
  };

  // A ticket that no other call has, not even one of another process: a state may outlive its own.
  uint64_t new_ticket();
  std::shared_ptr<StartedCall> make(const std::vector<int64_t>& sizes);
  // Remembers a call in place of the lane's last one.
  void put(int64_t lane, Id id, std::shared_ptr<StartedCall> call);
  // Returns a call; null if it is not remembered. It may be finished again: a program that runs
  // twice on the same state, on some ranks perhaps in another order, finds it twice.
  std::shared_ptr<StartedCall> find(Id id);

 private:
  std::mutex mutex_;
  BufferPool pool_;
  std::map<int64_t, std::pair<Id, std::shared_ptr<StartedCall>>> last_;  // by lane
  uint32_t count_ = 0, process_ = 0;
};

}  // namespace cgx

#endif  // CGX_MESSAGES_STARTED_H_
