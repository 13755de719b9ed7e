// Calls of the CPU handlers that nobody should make; the fuzzer found most of them. Each is refused
// with an error that names the value and its limit, or has nothing to do and ends at once.
#include <functional>
#include <vector>

#include "cases.h"
#include "handlers/frames.h"
#include "handlers/handlers.h"

namespace {

constexpr int64_t kHuge = int64_t{1} << 62;
constexpr auto kF32 = XLA_FFI_DataType_F32;
constexpr auto kU8 = XLA_FFI_DataType_U8;
constexpr auto kS32 = XLA_FFI_DataType_S32;
constexpr auto kU32 = XLA_FFI_DataType_U32;

const int32_t ranks[2] = {0, 0};
char memory[64];

// Arrays without values may have any other dimension.
const struct {
  const char* target;
  std::function<void(Frame*)> fill;
  const char* says;
} kCalls[] = {
    {"cgx_unpack_signs",
     [](Frame* f) {
       f->arg(kU8, memory, {1, 1}).ret(kF32, memory, {1, 8}).attr("count", INT64_MAX);
     },
     "count is 9223372036854775807, must be in [0, 281474976710656]"},
    {"cgx_unpack_signs",
     [](Frame* f) {
       f->arg(kU8, memory, {1, 0}).ret(kF32, memory, {1, 0}).attr("count", INT64_MIN);
     },
     "count is -9223372036854775808, must be in"},
    {"cgx_pack_signs",
     [](Frame* f) { f->arg(kF32, nullptr, {0, INT64_MAX}).ret(kU8, nullptr, {0, 1}); },
     "size of x is 9223372036854775807, must be in [0, 281474976710656]"},
    {"cgx_natural",
     [](Frame* f) {
       f->arg(kU32, nullptr, {0, 2}).arg(kF32, nullptr, {0, kHuge}).ret(kU8, nullptr, {0, 1});
     },
     "size of x is 4611686018427387904, must be in"},
    {"cgx_largest_of_buckets",
     [](Frame* f) {
       f->arg(kF32, nullptr, {0, kHuge}).ret(kS32, nullptr, {0, 1}).ret(kF32, nullptr, {0, 1});
       f->attr("bucket_size", int64_t{2}).attr("keep", int64_t{2});
     },
     "size of x is 4611686018427387904, must be in"},
    {"cgx_pack_signs",
     [](Frame* f) { f->arg(kF32, nullptr, {kHuge, 0}).ret(kU8, nullptr, {kHuge, 0}); }, ""},
    {"cgx_unpack_signs",
     [](Frame* f) {
       f->arg(kU8, nullptr, {kHuge, 0}).ret(kF32, nullptr, {kHuge, 0}).attr("count", int64_t{0});
     },
     ""},
    {"cgx_largest_of_buckets",
     [](Frame* f) {
       f->arg(kF32, nullptr, {kHuge, 0})
           .ret(kS32, nullptr, {kHuge, 0})
           .ret(kF32, nullptr, {kHuge, 0});
       f->attr("bucket_size", int64_t{2}).attr("keep", int64_t{2});
     },
     ""},
    {"cgx_decode",
     [](Frame* f) {
       f->arg(kU8, nullptr, {kHuge, 1, 0}).ret(kF32, nullptr, {kHuge, 0});
       f->attr("slots", std::vector<int64_t>{4, 64, 0, 0, 0, 0, 0, 0, 0}).attr("world", int64_t{1});
     },
     ""},
    {"cgx_accumulate",
     [](Frame* f) {
       f->arg(kS32, ranks, {2}).arg(kU8, nullptr, {kHuge, 0}).arg(kF32, nullptr, {2, 0});
       f->ret(kF32, nullptr, {2, 0}).attr("divisor", 1.0f);
       f->attr("slots", std::vector<int64_t>{4, 64, 0, 0, 0, 0, 0, 0, 0}).attr("world", int64_t{1});
     },
     "number of rows of payload is 4611686018427387904, must be in [1, 2^20]"},
    {"cgx_find_nonfinite", [](Frame* f) { f->ret(kS32, nullptr, {kHuge, 0, 2}); }, ""},
    {"cgx_find_nonfinite", [](Frame* f) { f->ret(kS32, nullptr, {0, 0, 2}); },
     "batch is 0, expected 1"},
    {"cgx_find_nonfinite", [](Frame* f) { f->arg(kF32, memory, {3}).ret(kS32, memory, {2, 1, 2}); },
     "leaf 0 has 3 values, must be a multiple of the batch of 2"},
    {"cgx_find_nonfinite", [](Frame* f) { f->arg(kS32, memory, {2}).ret(kS32, memory, {2, 1, 2}); },
     "dtype of leaf 0 is XLA type 4, must be f32, bf16 or f16"},
    {"cgx_find_nonfinite", [](Frame* f) { f->arg(kF32, memory, {2}).ret(kS32, memory, {1, 2, 2}); },
     "number of leaves is 1, expected 2"},
    {"cgx_find_nonfinite", [](Frame* f) { f->arg(kF32, memory, {2}).ret(kS32, memory, {1, 1, 3}); },
     "number of numbers per leaf is 3, expected 2"},
};

}  // namespace

int main() {
  for (const auto& c : kCalls) {
    Frame frame;
    c.fill(&frame);
    const std::string said = execute(cgx::cpu_handlers(), c.target, frame);
    const std::string expected = *c.says ? std::string(c.target) + ": " + c.says : "";
    check(said.find(expected) == 0 && said.empty() == expected.empty(),
          std::string(c.target) + ": expected '" + expected + "', got '" + said + "'");
  }
  return report();
}
