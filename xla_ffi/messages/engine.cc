#include "messages/engine.h"

#include <time.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <numeric>
#include <sstream>
#include <system_error>

namespace cgx {
namespace {

// How long a rank that ends waits for its calls in flight, and how long a message may still be in
// flight after the notice that its sender has left.
constexpr double kGraceSeconds = 1;
// The time between two checks for notices, which cost time for every rank.
constexpr double kHearSeconds = 0.01;

std::vector<int32_t> all_of(int64_t ranks) {
  std::vector<int32_t> all(ranks);
  std::iota(all.begin(), all.end(), 0);
  return all;
}

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// How a loop that finds nothing to do waits. The longer it is idle, the less it uses the cores.
class Backoff {
 public:
  void reset() { idle_ = 0; }
  void wait() {
    if (++idle_ < kYields) {
      std::this_thread::yield();
    } else {
      const timespec pause{0, idle_ < kShort ? 20000 : 100000};
      nanosleep(&pause, nullptr);
    }
  }

 private:
  static constexpr int kYields = 50, kShort = 2000;
  int idle_ = 0;
};

}  // namespace

// Reports results. The receiver of a report may run the rest of the program on the reporting
// thread, so there are as many threads as unfinished reports.
class Engine::Finisher {
 public:
  // Throws std::system_error if the system provides no thread at all.
  Finisher() {
    const std::lock_guard<std::mutex> lock(mutex_);
    start();
  }
  ~Finisher() {
    std::unique_lock<std::mutex> lock(mutex_);
    stop_ = true;
    wake_.notify_all();
    left_.wait(lock, [this] { return threads_ == 0; });
  }
  void report(Done done, std::string error) {
    const std::lock_guard<std::mutex> lock(mutex_);
    reports_.emplace_back(std::move(done), std::move(error));
    if (idle_ >= static_cast<int64_t>(reports_.size())) {
      wake_.notify_one();
    } else {
      start();
    }
  }

 private:
  // Starts a thread. If the system refuses it, the report waits for one of the existing threads.
  void start() {
    try {
      std::thread([this] { loop(); }).detach();
      ++threads_;
    } catch (const std::system_error&) {
      if (threads_ == 0) throw;
    }
  }
  void loop() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      ++idle_;
      wake_.wait(lock, [this] { return stop_ || !reports_.empty(); });
      --idle_;
      if (reports_.empty()) break;
      const auto [done, error] = std::move(reports_.front());
      reports_.pop_front();
      lock.unlock();
      done(error);
      lock.lock();
    }
    if (--threads_ == 0) left_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable wake_, left_;
  std::deque<std::pair<Done, std::string>> reports_;
  int64_t threads_ = 0, idle_ = 0;
  bool stop_ = false;
};

Engine::Engine(PortFactory ports, const EngineSettings& settings)
    : ports_(std::move(ports)),
      settings_(settings),
      workers_(settings.threads),
      notices_(std::make_unique<Notices>(ports_(all_of(settings.ranks)),
                                         ports_(all_of(settings.ranks)), settings.ranks,
                                         settings.rank, static_cast<int>(settings.largest_tag))),
      left_at_(settings.ranks),
      finisher_(std::make_unique<Finisher>()),
      thread_([this] { loop(); }) {}

Engine::~Engine() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  thread_.join();
  for (Active& active : lost_) active.call.release();  // its memory stays: see lost_
}

void Engine::listen() {
  notices_->listen();
  listens_ = true;
}

void Engine::submit(std::string name, std::vector<int32_t> peers, Start start, Done done,
                    int64_t lane) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    requests_.push_back(
        {std::move(name), std::move(peers), std::move(start), std::move(done), lane});
  }
  wake_.notify_one();
}

std::string Engine::failure() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

void Engine::loop() {
  Backoff backoff;
  double given_up_at = 0;
  for (;;) {
    std::list<Request> requests;
    bool stop;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      if (active_.empty() && waiting_.empty()) {
        wake_.wait(lock, [this] { return stop_ || !requests_.empty(); });
      }
      requests.swap(requests_);
      stop = stop_;
    }
    bool moved = !requests.empty();
    requests.splice(requests.begin(), waiting_);
    accept(std::move(requests));
    if (stop) {
      // Peers wait in the calls in flight too, and most of these calls end in a moment.
      if (given_up_at == 0) given_up_at = now() + kGraceSeconds;
      if (is_busy(kNoLane) && now() > given_up_at) fail("the process ended with calls in flight");
      if (active_.empty() && waiting_.empty()) break;
    }
    hear();
    // A call that fails makes all others fail, which empties the list.
    for (auto it = active_.begin(); !active_.empty() && it != active_.end();) moved |= move(it++);
    moved ? backoff.reset() : backoff.wait();
  }
  // If an engine follows, the others' next engines would take this notice for one of that engine.
  if (!followed_) notices_->send(Notices::kLeft, "");
}

void Engine::accept(std::list<Request> requests) {
  for (Request& request : requests) {
    if (const std::string broken = failure(); !broken.empty()) {
      finisher_->report(std::move(request.done),
                        request.name + ": an earlier call has failed (" + broken + ")");
      continue;
    }
    if (request.lane != kNoLane && is_busy(request.lane)) {
      waiting_.push_back(std::move(request));
      continue;
    }
    try {
      auto call = request.start({settings_.calls, ports_(request.peers), workers_, buffers_});
      std::list<Active> started(1);  // allocates before the request is moved
      started.front() = {std::move(request), std::move(call), now()};
      active_.splice(active_.end(), started);
    } catch (const std::bad_alloc&) {
      const std::string error = request.name + ": out of memory";
      finisher_->report(std::move(request.done), error);
      fail(error);  // the others would wait for this rank
    }
  }
}

bool Engine::is_busy(int64_t lane) const {
  return std::any_of(active_.begin(), active_.end(),
                     [lane](const Active& active) { return active.lane == lane; });
}

bool Engine::move(std::list<Active>::iterator active) {
  Call& call = *active->call;
  const bool moved = call.advance();
  if (moved) active->moved_at = now();
  if (!call.error().empty()) {
    fail(active->name + ": " + call.error());
  } else if (call.done()) {
    call.release(buffers_);
    finisher_->report(std::move(active->done), "");
    active_.erase(active);
  } else if (!moved && now() - active->moved_at > settings_.timeout_seconds) {
    std::ostringstream text;
    text << active->name << ": nothing moved for " << settings_.timeout_seconds
         << " s; waiting for " << call.awaited()
         << ". A rank has died, is busy for longer, or runs another program";
    fail(text.str());
  } else {
    return moved;
  }
  return true;
}

void Engine::hear() {
  if (!listens_ || active_.empty() || now() < hear_at_) return;
  hear_at_ = now() + kHearSeconds;
  if (notices_->poll()) {
    for (int64_t r = 0; r < settings_.ranks; ++r) {
      const Notices::Kind kind = notices_->of(r);
      if (kind == Notices::kLeft && left_at_[r] == 0) left_at_[r] = now();
      if (kind != Notices::kFailed) continue;
      fail("rank " + std::to_string(r) + " has failed (" + notices_->text(r) + ")", Notices::kNone);
      return;
    }
  }
  // A rank that leaves has done its part of the calls that it reached.
  for (const Active& active : active_) {
    for (size_t r = 0; r < active.peers.size(); ++r) {
      const double left_at = left_at_[active.peers[r]];
      if (left_at == 0 || now() < left_at + kGraceSeconds) continue;
      if (active.call->greeted(static_cast<int64_t>(r))) continue;
      fail(active.name + ": rank " + std::to_string(active.peers[r]) +
           " has ended without coming to this call: look at its output for an exception, or for "
           "a program that makes fewer calls");
      return;
    }
  }
}

void Engine::fail(const std::string& error, Notices::Kind tells) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failure_.empty()) failure_ = error;
  }
  if (tells != Notices::kNone) notices_->send(tells, error);
  for (Active& active : active_) {
    const bool own = error.rfind(active.name + ": ", 0) == 0;
    finisher_->report(std::move(active.done), own ? error : active.name + ": " + error);
  }
  lost_.splice(lost_.end(), active_);
}

}  // namespace cgx
