// If the system refuses threads, or a task throws, the caller is told and the process goes on.
#include "cpu/worker_pool.h"

#include <atomic>
#include <stdexcept>
#include <string>

#include "cases.h"
#include "cpu/parallel.h"
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

// Whichever thread the task runs on.
void what_a_task_throws_reaches_the_caller() {
  cgx::WorkerPool pool(4);
  for (int64_t bad = 0; bad < 100; ++bad) {
    std::atomic<int> done{0};
    std::string error;
    try {
      cgx::parallel_for(pool, 100, [&](int64_t task, int64_t) {
        if (task == bad) throw std::runtime_error("task " + std::to_string(task));
        ++done;
      });
    } catch (const std::runtime_error& thrown) {
      error = thrown.what();
    }
    check(error == "task " + std::to_string(bad) && done == 99, "a task throws: " + error);
  }
}

}  // namespace

int main() {
  too_many();
  all_tasks_run();
  what_a_task_throws_reaches_the_caller();
  return report();
}
