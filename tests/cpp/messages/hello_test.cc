// First messages find whatever two ranks differ in, and name the programs.
#include "messages/hello.h"

#include "cases.h"

namespace {

using cgx::Hello;
using cgx::Program;

Hello of_rank(int64_t rank, const std::string& program) {
  return {cgx::kHelloVersion, 7, 100, 2, rank, Program(program)};
}

void differences() {
  const Hello own = of_rank(0, "jit_step, train.py:10"), same = of_rank(1, "jit_step, train.py:10");
  check(cgx::disagreement(1, same, own).empty(), "the same call");
  check(!cgx::disagreement(2, same, own).empty(), "another rank");
  for (auto [field, name] :
       {std::pair{&Hello::total_bytes, "bytes"}, std::pair{&Hello::segments, "segments"}}) {
    Hello other = same;
    other.*field += 1;
    const std::string text = cgx::disagreement(1, other, own);
    check(text.find("rank 1 is in another call") == 0, std::string("other ") + name);
  }
  const std::string text = cgx::disagreement(1, of_rank(1, "jit_test, train.py:90"), own);
  check(text.find("rank 1 is in another program (jit_test, train.py:90) than this rank "
                  "(jit_step, train.py:10)") == 0,
        "both programs are named: " + text);
}

void long_names() {
  const std::string common(100, 'x');
  const std::string text = cgx::disagreement(1, of_rank(1, common + "a"), of_rank(0, common + "b"));
  check(text.find("another program (" + std::string(64, 'x') + ") than") != std::string::npos,
        "names that differ past the end of the message");
}

// A peer may send anything, but no terminal must obey it.
void hostile_names() {
  const std::string text = cgx::disagreement(1,
                                             of_rank(1,
                                                     "a\x1b[2J\x9b"
                                                     "b\x7f"),
                                             of_rank(0, "step"));
  check(text.find("another program (a?[2J?b?) than") != std::string::npos,
        "what is not printable is not shown: " + text);
}

}  // namespace

int main() {
  differences();
  hostile_names();
  long_names();
  return report();
}
