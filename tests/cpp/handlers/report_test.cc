// The report call refuses wrong operands, and fails with the error that the listener returns.
#include "handlers/report.h"

#include <vector>

#include "cases.h"
#include "handlers/frames.h"

namespace {

struct Case {
  int64_t steps, ranks, table, told;
  const char* says;
};
const Case kCases[] = {
    {2, 2, 12, 1, "text of 2 in 12: 7 8 9"},
    {1, 1, 6, 1, ""},
    {0, 0, 12, 1, "report: batch is 0, expected 1"},
    {2, 1, 12, 1, "report: size of ranks is 1, expected 2"},
    {2, 3, 12, 1, "report: size of ranks is 3, expected 2"},
    {2, 2, 11, 1, "report: size of table is 11, must be a positive multiple of the batch of 2"},
    {2, 2, 0, 1, "report: size of table is 0, must be a positive multiple of the batch of 2"},
    {2, 2, 12, 2, "report: size of the result is 2, expected 1"},
};

std::string called(const Case& c) {
  const std::vector<int32_t> steps(c.steps + 1, 7), ranks(c.ranks + 1, 8), table(c.table + 1, 9);
  std::vector<int32_t> told(c.told, -1);
  Frame frame;
  frame.arg(XLA_FFI_DataType_S32, steps.data(), {c.steps})
      .arg(XLA_FFI_DataType_S32, ranks.data(), {c.ranks})
      .arg(XLA_FFI_DataType_S32, table.data(), {c.table})
      .ret(XLA_FFI_DataType_S32, told.data(), {c.told})
      .attr("text", "text");
  XLA_FFI_InvokeContext context;
  const std::string said =
      frame.call(cgx::report_handler, XLA_FFI_ExecutionStage_EXECUTE, &context);
  check(!said.empty() || told[0] == 0, "the result is not 0");
  return said;
}

void expect(const std::string& said, const std::string& expected) {
  check(said == expected, "expected '" + expected + "', got '" + said + "'");
}

}  // namespace

int main() {
  expect(called(kCases[0]), "report: nobody listens");
  cgx::set_listener([](const cgx::Report&) { return std::string("an older one"); });
  cgx::set_listener([](const cgx::Report& r) -> std::string {
    if (r.batch == 1) return "";
    return std::string(r.text) + " of " + std::to_string(r.batch) + " in " +
           std::to_string(r.size) + ": " + std::to_string(r.steps[r.batch - 1]) + " " +
           std::to_string(r.ranks[r.batch - 1]) + " " + std::to_string(r.table[r.size - 1]);
  });
  for (const Case& c : kCases) expect(called(c), c.says);
  return report();
}
