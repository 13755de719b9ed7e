// An engine reports its calls even if the system refuses more threads.
#include "messages/engine.h"

#include <atomic>
#include <chrono>
#include <system_error>
#include <thread>

#include "cases.h"
#include "messages/network.h"
#include "messages/rows.h"
#include "refused_threads.h"

namespace {

cgx::EngineSettings alone() { return {1, 0, 32767, {64, 2}, 60, 1}; }

void reports_without_more_threads() {
  constexpr int kCalls = 20;
  std::atomic<int> done{0};
  std::vector<uint8_t> in(100, 1), out(100);
  {
    cgx::Engine engine(port_of<SilentPort>, alone());
    threads_left = 0;
    for (int i = 0; i < kCalls; ++i) {
      engine.submit(
          "call " + std::to_string(i), {0},
          [&](cgx::Engine::Means means) {
            return std::make_unique<cgx::RowsCall>(
                cgx::RowsSpec{true, in.data(), out.data(), 100, 1, 0, 0}, means.settings,
                std::move(means.port), means.buffers);
          },
          [&](const std::string& error) { done += error.empty(); });
    }
  }
  threads_left = INT64_MAX;
  check(done == kCalls, std::to_string(done) + " of the calls are reported");
  check(in == out, "the row has been moved");
}

// An engine that cannot get all of its threads is refused as a whole.
void refused_as_a_whole() {
  for (const int threads : {0, 1}) {
    threads_left = threads;
    bool refused = false;
    try {
      const cgx::Engine engine(port_of<SilentPort>, alone());
    } catch (const std::system_error&) {
      refused = true;
    }
    threads_left = INT64_MAX;
    check(refused,
          "an engine of two threads is refused where there are " + std::to_string(threads));
  }
}

// A call that is over when the test says so.
class HeldCall : public cgx::Call {
 public:
  explicit HeldCall(const std::atomic<bool>& over) : over_(over) {}
  bool advance() override { return false; }
  bool done() const override { return over_; }
  const std::string& error() const override { return none_; }
  std::string awaited() const override { return "the test"; }
  bool greeted(int64_t) const override { return true; }
  void release(cgx::BufferPool&) override {}

 private:
  const std::atomic<bool>& over_;
  const std::string none_;
};

bool soon(const std::atomic<int>& count, int value) {
  for (int i = 0; i < 2000 && count != value; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return count == value;
}

// Calls of one lane run in the order in which they come, and those of others beside them. A lane's
// calls are not given up when the process ends.
void in_lanes() {
  std::atomic<bool> over[4] = {};
  std::atomic<int> begun[4] = {};
  std::atomic<int> done{0};
  {
    cgx::Engine engine(port_of<SilentPort>, alone());
    for (int i = 0; i < 4; ++i) {
      engine.submit(
          "call " + std::to_string(i), {0},
          [&, i](cgx::Engine::Means) {
            ++begun[i];
            return std::make_unique<HeldCall>(over[i]);
          },
          [&](const std::string& error) { done += error.empty(); }, i == 3 ? 1 : 0);
    }
    check(soon(begun[0], 1) && soon(begun[3], 1), "the first call of each lane begins");
    check(begun[1] == 0 && begun[2] == 0, "the other calls wait");
    over[0] = true;
    check(soon(begun[1], 1) && begun[2] == 0, "the second call begins after the first");
    over[1] = over[3] = true;
    check(soon(begun[2], 1), "the last call begins, although no other is in flight");
    std::thread([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(1500));  // longer than the grace
      over[2] = true;
    }).detach();
  }
  check(done == 4, std::to_string(done) + " of the calls in lanes are reported without an error");
}

}  // namespace

int main() {
  in_lanes();
  reports_without_more_threads();
  refused_as_a_whole();
  return report();
}
