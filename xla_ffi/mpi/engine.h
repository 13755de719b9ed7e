// Runs calls, fused ones and those that move rows, on a thread of its own.
//
// The runtime may start the calls of a program in any order, another one on every rank, and has few
// threads. So a call takes none of them: its handler hands it over and returns, and all calls in
// flight move side by side. None waits for another, and each has message tags of its own.
#ifndef CGX_MPI_ENGINE_H_
#define CGX_MPI_ENGINE_H_

#include <stdint.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "cpu/worker_pool.h"
#include "mpi/buffer_pool.h"
#include "mpi/call.h"
#include "mpi/library.h"
#include "mpi/notices.h"

namespace cgx {

struct EngineSettings {
  int64_t ranks;        // of the communicator
  int64_t rank;         // of this process
  int64_t largest_tag;  // takes the notices, and those below it the calls
  CallSettings calls;
  double timeout_seconds;  // without any message from a peer
  int64_t threads;         // that run the kernels
};

class Engine {
 public:
  // What a call is made with, on the engine's thread.
  struct Means {
    const CallSettings& settings;
    std::unique_ptr<Port> port;
    WorkerPool& workers;
    BufferPool& buffers;
  };
  using Start = std::function<std::unique_ptr<Call>(Means means)>;
  // Receives what went wrong, empty when nothing did. Called on a thread that may be kept.
  using Done = std::function<void(const std::string& error)>;

  Engine(std::unique_ptr<MpiLibrary> library, const EngineSettings& settings);
  // Calls in flight have a moment to end, and fail after it. Tells the others that this rank
  // leaves, unless another engine is to follow on the same communicator.
  ~Engine();

  void is_followed() { followed_ = true; }

  // `name` says in errors which call this is; `peers` are the ranks of the group.
  void submit(std::string name, std::vector<int32_t> peers, Start start, Done done);
  const EngineSettings& settings() const { return settings_; }
  // What made the first call fail; calls after it fail too, since messages may be lost.
  std::string failure() const;

 private:
  struct Active {
    std::string name;
    std::vector<int32_t> peers;
    std::unique_ptr<Call> call;
    Done done;
    double moved_at;
  };
  struct Request {
    std::string name;
    std::vector<int32_t> peers;
    Start start;
    Done done;
  };
  class Finisher;

  void loop();
  void accept(std::list<Request> requests);
  bool move(std::list<Active>::iterator active);  // false when nothing moved
  // Fails what a rank that has told it can no longer come to.
  void hear();
  void fail(const std::string& error, Notices::Kind tells = Notices::kFailed);

  const std::unique_ptr<MpiLibrary> library_;
  const EngineSettings settings_;
  WorkerPool workers_;
  BufferPool buffers_;
  std::unique_ptr<Notices> notices_;
  std::vector<double> left_at_;  // by rank; 0 where it has not
  double hear_at_ = 0;
  std::unique_ptr<Finisher> finisher_;
  std::list<Active> active_;
  std::list<Active> lost_;  // failed: kept, since messages may still write to their memory

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::list<Request> requests_;
  std::string failure_;
  bool stop_ = false;
  std::atomic<bool> followed_{false};
  std::thread thread_;
};

}  // namespace cgx

#endif  // CGX_MPI_ENGINE_H_
