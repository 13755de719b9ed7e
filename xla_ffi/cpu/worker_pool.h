// A thread pool of our own, for places where XLA's pool cannot be used.
#ifndef CGX_CPU_WORKER_POOL_H_
#define CGX_CPU_WORKER_POOL_H_

#include <stdint.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

namespace cgx {

// Threads that wait for tasks, as XLA's do; the caller counts as one of them.
class WorkerPool {
 public:
  // Throws std::system_error if the system does not provide that many threads.
  explicit WorkerPool(int64_t threads) : threads_(threads) {
    running_.reserve(static_cast<size_t>(threads));  // so that nothing else fails below
    try {
      for (int64_t t = 1; t < threads; ++t) running_.emplace_back([this] { loop(); });
    } catch (const std::system_error& error) {
      const std::string started = std::to_string(running_.size() + 1);
      join();  // a thread that is destroyed unjoined ends the process
      throw std::system_error(error.code(), "threads=" + std::to_string(threads) +
                                                " is more than the " + started +
                                                " that this process may have; ask for fewer, or "
                                                "raise its limits of processes and memory");
    }
  }
  ~WorkerPool() { join(); }
  int64_t num_threads() const { return threads_; }
  void Schedule(std::function<void()> task) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    wake_.notify_one();
  }

 private:
  void join() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : running_) thread.join();
  }
  void loop() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return stop_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  const int64_t threads_;
  bool stop_ = false;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;
  std::vector<std::thread> running_;  // last: its threads use all of the above
};

}  // namespace cgx

#endif  // CGX_CPU_WORKER_POOL_H_
