// What the parts of the fuzzer share. A target makes a case from a random source and counts its
// calls. main.cc runs the targets.
#ifndef CGX_TESTS_FUZZ_FUZZ_H_
#define CGX_TESTS_FUZZ_FUZZ_H_

#include <string>

#include "fuzz/random.h"

namespace fuzz {

// Counts a call of `name`, and whether it was refused.
void count(const char* name, bool refused);
// Ends the case, and the program, as failed.
[[noreturn]] void fail(const std::string& what);

struct Target {
  const char* name;
  void (*run)(Random& random);  // one case
  int64_t share = 1;            // its share of the minutes
  bool leaks = false;           // whether calls that fail keep their memory, on purpose
};

void cpu_case(Random& random);
void cuda_case(Random& random);
void layout_case(Random& random);
void mpi_case(Random& random);
void nccl_case(Random& random);
void peer_case(Random& random);
void rows_case(Random& random);
void timing_case(Random& random);

}  // namespace fuzz

#endif  // CGX_TESTS_FUZZ_FUZZ_H_
