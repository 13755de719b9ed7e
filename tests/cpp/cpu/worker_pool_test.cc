// A pool that the system refuses threads says so, and the process goes on.
#include "cpu/worker_pool.h"

#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <fstream>
#include <string>

#include "cases.h"

namespace {

#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
int64_t address_space() {
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * sysconf(_SC_PAGESIZE);
}

void too_many() {
  // Room for the stacks of some threads: limits of processes do not hold for root.
  rlimit before;
  getrlimit(RLIMIT_AS, &before);
  rlimit less = before;
  less.rlim_cur = static_cast<rlim_t>(address_space() + (int64_t{256} << 20));
  setrlimit(RLIMIT_AS, &less);
  std::string error;
  try {
    cgx::WorkerPool pool(1 << 14);
  } catch (const std::system_error& refused) {
    error = refused.what();
  }
  setrlimit(RLIMIT_AS, &before);
  check(error.find("threads=16384 is more than the ") == 0, "refused: " + error);
  check(error.find("ask for fewer") != std::string::npos, "and the remedy named");
}
#else
void too_many() {}  // sanitizers need the address space
#endif

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
