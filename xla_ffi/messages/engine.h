// Runs calls, both fused calls and calls that move rows, on its own thread.
//
// The runtime may start the calls of a program in any order, which may differ between ranks, and it
// has few threads. So a call occupies none of them: its handler hands the call over and returns.
// All calls in flight progress side by side. None waits for another, and each has its own message
// tags.
#ifndef CGX_MESSAGES_ENGINE_H_
#define CGX_MESSAGES_ENGINE_H_

#include <stdint.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "cpu/worker_pool.h"
#include "messages/buffer_pool.h"
#include "messages/call.h"
#include "messages/notices.h"
#include "messages/port.h"

namespace cgx {

struct EngineSettings {
  int64_t ranks;        // of the transport
  int64_t rank;         // of this process
  int64_t largest_tag;  // for notices; calls use the tags below it
  CallSettings calls;
  double timeout_seconds;  // how long a call may make no progress
  int64_t threads;         // that run the kernels
};

class Engine {
 public:
  static constexpr int64_t kNoLane = -1;
  // What a call is created with, on the engine's thread.
  struct Means {
    const CallSettings& settings;
    std::unique_ptr<Port> port;
    WorkerPool& workers;
    BufferPool& buffers;
  };
  using Start = std::function<std::unique_ptr<Call>(Means means)>;
  // Receives what went wrong; empty if nothing did. It may keep the thread that it is called on.
  using Done = std::function<void(const std::string& error)>;

  Engine(PortFactory ports, const EngineSettings& settings);
  // Gives calls in flight a moment to end; after that they fail. Tells the other ranks that this
  // rank leaves, unless another engine follows on the same ports.
  ~Engine();

  // Another engine follows on the same ports.
  void is_followed() { followed_ = true; }
  // From now on, hears what other ranks tell. Any earlier engine on the same ports must be gone.
  void listen();

  // `name` identifies the call in errors; `peers` are the ranks of the group. Calls of one lane run
  // one after the other. A call that has a lane (0 or more) may be one that nobody waits for, so it
  // keeps its whole timeout when the process ends.
  void submit(std::string name, std::vector<int32_t> peers, Start start, Done done,
              int64_t lane = kNoLane);
  const EngineSettings& settings() const { return settings_; }
  // What made the first call fail. Later calls fail too, because messages may be lost.
  std::string failure() const;

 private:
  struct Request {
    std::string name;
    std::vector<int32_t> peers;
    Start start;
    Done done;
    int64_t lane;
  };
  struct Active : Request {
    std::unique_ptr<Call> call;
    double moved_at;
  };
  class Finisher;

  void loop();
  // Starts the requests whose lane is free, and keeps the others.
  void accept(std::list<Request> requests);
  bool is_busy(int64_t lane) const;
  bool move(std::list<Active>::iterator active);  // false when nothing moved
  // Fails the calls in flight if a rank has said that it failed, or that it left before it reached
  // one of them.
  void hear();
  void fail(const std::string& error, Notices::Kind tells = Notices::kFailed);

  const PortFactory ports_;
  const EngineSettings settings_;
  WorkerPool workers_;
  BufferPool buffers_;
  std::unique_ptr<Notices> notices_;
  std::vector<double> left_at_;  // by rank; 0 if it has not left
  double hear_at_ = 0;
  std::unique_ptr<Finisher> finisher_;
  std::list<Active> active_;
  std::list<Request> waiting_;  // for their lanes
  std::list<Active> lost_;      // failed; kept because messages may still write to their memory

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::list<Request> requests_;
  std::string failure_;
  bool stop_ = false;
  std::atomic<bool> followed_{false}, listens_{false};
  std::thread thread_;
};

}  // namespace cgx

#endif  // CGX_MESSAGES_ENGINE_H_
