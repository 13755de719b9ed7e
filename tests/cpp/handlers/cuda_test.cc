// The CUDA handlers of the codec, driven by handmade call frames like those that XLA makes.
// Everything below the handlers is emulated. Needs the FFI headers of a jaxlib with the collectives
// extension.
#include <algorithm>

#include "cases.h"
#include "cpu/kernels.h"
#include "handlers/frames.h"
#include "handlers/handlers.h"

namespace {

using Bytes = std::vector<uint8_t>;

constexpr int64_t kWorld = 2, kValues = 1000, kBits = 4, kBucket = 64, kRotation = 1,
                  kSlotSegment = 7;
constexpr int64_t kCorrelated = 2;

void with_layout(Frame& frame, int64_t rounding, int64_t bits = kBits, int64_t columns = 0,
                 int64_t first_column = 0, int64_t bucket = kBucket) {
  frame
      .attr("slots", std::vector<int64_t>{bits, bucket, rounding, 0, kRotation, kSlotSegment,
                                          columns, 0, first_column})
      .attr("world", kWorld);
}

void codec() {
  std::mt19937 rng(1);
  std::normal_distribution<float> normal;
  std::vector<float> x(kValues);
  for (float& v : x) v = normal(rng);
  for (int64_t i = 0; i < kValues; ++i) {
    if (i / 30 % 3 == 0) x[i] = 0;
  }
  cgx::OwnedLayout owned;
  check(owned.build({{kValues, kBits, kBucket, kCorrelated, 0, kRotation, kSlotSegment}}, kWorld)
            .empty(),
        "codec: layout");
  const cgx::Layout layout = owned.view();
  const int64_t row = layout.chunk_bytes;
  const uint32_t key[2] = {1, 2};
  const int32_t rank = 1;
  Bytes payload(kWorld * row, 0xAA), expected(kWorld * row), chunk(row, 0xAA), expected_chunk(row);
  const cgx::DType dtype = cgx::DType::kF32;
  const void* in = x.data();
  const cgx::KernelTable& cpu = cgx::current_kernels();
  std::vector<float> scratch(owned.scratch_values());
  cpu.encode({layout, {&in, &dtype}, {}, key, rank, expected.data(), scratch.data()}, 0,
             layout.total_bytes());
  constexpr int64_t kRows = 20, kColumns = 50, kCount = kRows + kColumns;
  std::vector<float> factors(2 * kCount);
  for (float& f : factors) f = normal(rng);
  struct How {
    int64_t bytes, bits = kBits, bucket = kBucket;
    bool has_units = false, gives_units = false;
    XLA_FFI_DataType type = XLA_FFI_DataType_F32;
  };
  const auto encode = [&](const How& how) {
    Frame frame;
    frame.arg(XLA_FFI_DataType_U32, key, {2})
        .arg(XLA_FFI_DataType_S32, &rank, {})
        .arg(how.type, x.data(), {kValues})
        .ret(XLA_FFI_DataType_U8, payload.data(), {kWorld, how.bytes});
    if (how.gives_units) frame.arg(XLA_FFI_DataType_F32, factors.data(), {2, kCount});
    with_layout(frame, kCorrelated, how.bits, how.has_units ? kColumns : 0, kRows, how.bucket);
    return execute(cgx::cuda_handlers(), "cgx_encode", frame);
  };
  check(encode({row}).empty(), "codec: encode");
  check(payload == expected, "codec: payload");
  const std::pair<How, const char*> refused[] = {
      {{row - 4}, "cgx_encode: size of payload is"},
      {{row, kBits, kBucket, false, false, XLA_FFI_DataType_S32}, "must be f32, bf16 or f16"},
      {{row, 9}, "bits of leaf 0 is 9, must be in [1, 8]"},
      {{row, kBits, kBucket, true},
       "cgx_encode: number of operands is 1, must be at least 2, the leaves and their units"},
      {{row, kBits, 1024, true, true},
       "bucket_size of leaf 0 is 1024, must be at most 512 with units"}};
  for (const auto& [how, says] : refused) check(has(encode(how), says), says);
  const cgx::LeafUnits units{factors.data(), factors.data() + kRows, kColumns, kCount};
  Bytes in_units(kWorld * row);
  cpu.encode({layout, {&in, &dtype}, {}, key, rank, in_units.data(), scratch.data(), &units}, 0,
             layout.total_bytes());
  check(encode({row, kBits, kBucket, true, true}).empty(), "codec: encode in units");
  check(payload == in_units && payload != expected, "codec: payload in units");
  check(encode({row}).empty() && payload == expected, "codec: again");

  std::vector<float> lost(kValues, 7.0f), expected_lost = lost, elsewhere = lost;
  void* const expected_residual = expected_lost.data();
  cpu.reduce({layout,
              {&in, &dtype},
              key,
              rank,
              payload.data(),
              3.0f,
              expected_chunk.data(),
              scratch.data(),
              {&expected_residual, &dtype}},
             layout.begin[rank], layout.begin[rank + 1]);
  const auto reduce = [&](float* given, float* filled) {
    std::fill(chunk.begin(), chunk.end(), uint8_t{0xAA});
    Frame frame;
    frame.arg(XLA_FFI_DataType_U32, key, {2})
        .arg(XLA_FFI_DataType_S32, &rank, {})
        .arg(XLA_FFI_DataType_U8, payload.data(), {kWorld, row})
        .arg(XLA_FFI_DataType_F32, x.data(), {kValues});
    if (given) frame.arg(XLA_FFI_DataType_F32, given, {kValues});
    frame.ret(XLA_FFI_DataType_U8, chunk.data(), {row}).attr("divisor", 3.0f);
    if (filled) frame.ret(XLA_FFI_DataType_F32, filled, {kValues});
    with_layout(frame, kCorrelated);
    return execute(cgx::cuda_handlers(), "cgx_reduce", frame);
  };
  check(reduce(nullptr, nullptr).empty(), "codec: reduce");
  check(chunk == expected_chunk, "codec: chunk");
  check(reduce(lost.data(), lost.data()).empty(), "codec: reduce with residual");
  check(chunk == expected_chunk && lost == expected_lost, "codec: chunk and residual");
  check(has(reduce(lost.data(), elsewhere.data()), "must lie where their operands lie"),
        "codec: a residual that was moved is refused");
}

void kernels_may_be_recorded() {
  for (const cgx::Handler& handler : cgx::cuda_handlers()) {
    check(may_be_recorded(handler.call), std::string(handler.target) + " may be recorded");
  }
}

}  // namespace

int main() {
  codec();
  kernels_may_be_recorded();
  return report();
}
