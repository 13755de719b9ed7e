// If the system refuses threads, a pool says so and the process goes on.
#include "cpu/worker_pool.h"

#include <atomic>
#include <string>

#include "cases.h"
#include "refused_threads.h"

namespace {

void too_many() {
  threads_left = 5;
  std::string error;
  try {
    cgx::WorkerPool pool(1024);
  } catch (const std::system_error& refused) {
    error = refused.what();
  }
  threads_left = INT64_MAX;
  check(
      error.find("threads=1024 is more than the 6 that this process may have; ask for fewer") == 0,
      "refused, with the number and the remedy: " + error);
}

void all_tasks_run() {
  std::atomic<int> done{0};
  {
    cgx::WorkerPool pool(4);
    for (int i = 0; i < 100; ++i) pool.Schedule([&] { ++done; });
  }
  check(done == 100, "a pool that ends has run its tasks");
}

}  // namespace

int main() {
  too_many();
  all_tasks_run();
  return report();
}
