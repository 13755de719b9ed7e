// Makes thousands of calls with random and hostile arguments. Each must be refused with an error or
// succeed. The sanitizers that it is built with see reads and writes outside a call's memory.
//
//   fuzz [TARGET...] [--seed N] [--calls M | --minutes T]   M cases of each target, or T minutes
//   fuzz TARGET --seed N --case K                           one case, in this process
//
// Cases run in their own process. Whatever ends that process, its last case is known, and the
// command that repeats the case is printed.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <thread>
#include <vector>

#include "fuzz/fuzz.h"

namespace fuzz {
namespace {

const Target kTargets[] = {
    {"rows", rows_case},
#if defined(CGX_FUZZ_ALONE)  // targets without threads
    {"layout", layout_case}, {"timing", timing_case},
#endif
#if defined(CGX_FUZZ_HANDLERS)
    {"cpu", cpu_case, 10},   {"mpi", mpi_case, 1, true},
#endif
#if defined(CGX_FUZZ_CUDA)
    {"cuda", cuda_case, 2},  {"nccl", nccl_case},        {"peer", peer_case},
#endif
};

struct Count {
  char name[40];
  int64_t calls, refused;
};

// What the process of the cases leaves behind. Both processes map it.
struct Shared {
  std::atomic<int64_t> number;  // of the case
  Count counts[32];
};
Shared* shared = nullptr;

struct Options {
  std::vector<const Target*> targets;
  uint64_t seed = 1;
  int64_t calls = 10000, one = -1;
  double minutes = 0;
};

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void run_case(const Target& target, const Options& options, int64_t number) {
  shared->number = number;
  Random random(options.seed, static_cast<uint64_t>(number));
  try {
    target.run(random);
  } catch (const std::exception& error) {
    fail(std::string("a call has thrown: ") + error.what());
  }
}

// Runs cases, in their own process, until there are enough of them or the time is over.
void run_cases(const Target& target, const Options& options, double seconds) {
  const double end = now() + seconds;
  for (int64_t k = 0; seconds > 0 ? now() < end : k < options.calls; ++k) {
    run_case(target, options, k);
  }
}

// Waits for the process. Returns what is wrong with its end, or "". It kills the process if a case
// takes too long. It counts checks, not seconds, because the whole program may be stopped for a
// while.
std::string ended(pid_t process) {
  constexpr int kMostLooks = 1200;
  constexpr auto kBetween = std::chrono::milliseconds(100);
  int status = 0, looks = 0;
  for (int64_t last = -1; waitpid(process, &status, WNOHANG) == 0;) {
    if (const int64_t number = shared->number; number != last) last = number, looks = 0;
    if (++looks > kMostLooks) {
      kill(process, SIGKILL);
      waitpid(process, &status, 0);
      return "it does not end";
    }
    std::this_thread::sleep_for(kBetween);
  }
  if (WIFSIGNALED(status)) return std::string("ended by signal ") + strsignal(WTERMSIG(status));
  return WEXITSTATUS(status) == 0 ? "" : "failed";
}

// Runs a target and adds its calls to `all`. Returns whether all cases passed.
bool run_target(const Target& target, const Options& options, int64_t* all) {
  memset(static_cast<void*>(shared), 0, sizeof(Shared));
  int64_t shares = 0;
  for (const Target* other : options.targets) shares += other->share;
  const double start = now(), each = 60 * options.minutes * target.share / shares;
  fflush(stdout);
  const pid_t process = fork();
  if (process == 0) {
    run_cases(target, options, each);
    if (!target.leaks) exit(0);
    fflush(nullptr);
    _exit(0);
  }
  const std::string wrong = ended(process);
  const double seconds = now() - start;
  int64_t calls = 0;
  for (const Count& own : shared->counts) {
    if (own.calls == 0) break;
    printf("  %-32s %12lld calls, %5.1f %% refused\n", own.name, static_cast<long long>(own.calls),
           100.0 * own.refused / own.calls);
    calls += own.calls;
  }
  printf("%s: %lld calls in %.1f s, %.0f per second\n", target.name, static_cast<long long>(calls),
         seconds, calls / seconds);
  *all += calls;
  if (wrong.empty()) return true;
  printf("FAILED: %s. Repeat it with: fuzz %s --seed %llu --case %lld\n", wrong.c_str(),
         target.name, static_cast<unsigned long long>(options.seed),
         static_cast<long long>(shared->number));
  return false;
}

bool parse(int argc, char** argv, Options* options) {
  for (int i = 1; i < argc; ++i) {
    const std::string given = argv[i];
    if (given.rfind("--", 0) == 0) {
      if (++i == argc) return false;
      if (given == "--seed")
        options->seed = strtoull(argv[i], nullptr, 10);
      else if (given == "--calls")
        options->calls = atoll(argv[i]);
      else if (given == "--case")
        options->one = atoll(argv[i]);
      else if (given == "--minutes")
        options->minutes = atof(argv[i]);
      else
        return false;
      continue;
    }
    const size_t before = options->targets.size();
    for (const Target& target : kTargets) {
      if (given == target.name) options->targets.push_back(&target);
    }
    if (options->targets.size() == before) return false;
  }
  if (options->targets.empty()) {
    for (const Target& target : kTargets) options->targets.push_back(&target);
  }
  return options->one < 0 || options->targets.size() == 1;
}

}  // namespace

void count(const char* name, bool refused) {
  for (Count& own : shared->counts) {
    if (own.calls == 0) snprintf(own.name, sizeof(own.name), "%s", name);
    if (strcmp(own.name, name) != 0) continue;
    ++own.calls;
    own.refused += refused;
    return;
  }
  fail(std::string("no room to count ") + name);
}

void fail(const std::string& what) {
  fprintf(stderr, "FAILED: %s\n", what.c_str());
  _exit(1);  // other threads may be at work
}

int program(int argc, char** argv) {
  Options options;
  if (!parse(argc, argv, &options)) {
    printf("usage: fuzz [TARGET...] [--seed N] [--calls M | --minutes T | --case K]; targets:");
    for (const Target& target : kTargets) printf(" %s", target.name);
    printf("\n");
    return 2;
  }
  void* const memory =
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return 2;
  shared = new (memory) Shared();
  if (options.one >= 0) {
    run_case(*options.targets[0], options, options.one);
    return 0;
  }
  int64_t calls = 0;
  bool passed = true;
  const double start = now();
  for (const Target* target : options.targets) passed &= run_target(*target, options, &calls);
  printf("all: %lld calls in %.0f s, seed %llu\n", static_cast<long long>(calls), now() - start,
         static_cast<unsigned long long>(options.seed));
  return !passed;
}

}  // namespace fuzz

int main(int argc, char** argv) { return fuzz::program(argc, argv); }
