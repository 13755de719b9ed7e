// An engine reports its calls even if the system refuses more threads.
#include "messages/engine.h"

#include <atomic>
#include <system_error>

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
    cgx::Engine engine(std::make_unique<SilentPorts>(), alone());
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
      const cgx::Engine engine(std::make_unique<SilentPorts>(), alone());
    } catch (const std::system_error&) {
      refused = true;
    }
    threads_left = INT64_MAX;
    check(refused,
          "an engine of two threads is refused where there are " + std::to_string(threads));
  }
}

}  // namespace

int main() {
  reports_without_more_threads();
  refused_as_a_whole();
  return report();
}
