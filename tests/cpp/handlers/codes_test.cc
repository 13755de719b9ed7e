// The CUDA handlers of codes, driven by handmade call frames like those that XLA makes. Everything
// below the handlers is emulated. For a batch they must write what the CPU kernels write.
#include "cuda/codes.h"

#include "cases.h"
#include "cpu/kernels.h"
#include "cpu/select.h"
#include "handlers/frames.h"
#include "handlers/handlers.h"

namespace {

constexpr int64_t kBatch = 3, kValues = 1001;

struct Inputs {
  std::vector<float> x = std::vector<float>(kBatch * kValues);
  std::vector<uint32_t> words = std::vector<uint32_t>(2 * kBatch);

  Inputs() {
    std::mt19937 rng(2);
    std::normal_distribution<float> normal;
    for (float& v : x) v = normal(rng);
    for (uint32_t& word : words) word = static_cast<uint32_t>(rng());
  }
};

std::string qsgd(const Inputs& in, int64_t bucket_size, std::vector<uint8_t>* out) {
  Frame frame;
  const int64_t bytes = static_cast<int64_t>(out->size()) / kBatch;
  frame.arg(XLA_FFI_DataType_U32, in.words.data(), {kBatch, 2})
      .arg(XLA_FFI_DataType_F32, in.x.data(), {kBatch, kValues})
      .ret(XLA_FFI_DataType_U8, out->data(), {kBatch, bytes})
      .attr("bucket_size", bucket_size)
      .attr("levels", int64_t{7})
      .attr("l2", int64_t{1});
  return execute(cgx::cuda_handlers(), "cgx_qsgd", frame);
}

void levels(const Inputs& in) {
  constexpr int64_t kBucket = 96, kBuckets = (kValues + kBucket - 1) / kBucket, kWidth = 4;
  constexpr int64_t kPacked = (kValues * kWidth + 7) / 8, kBytes = kPacked + 4 * kBuckets;
  std::vector<uint8_t> expected(kBatch * kBytes), got(kBatch * kBytes, 0xAA);
  for (int64_t b = 0; b < kBatch; ++b) {
    uint8_t* const codes = &expected[b * kBytes];
    cgx::current_kernels().codes.encode_buckets(
        {cgx::Coded::kSteps, &in.x[b * kValues], kValues, &in.words[2 * b], codes, codes + kPacked,
         kBucket, 7, true, kWidth},
        0, kValues);
  }
  check(qsgd(in, kBucket, &got).empty() && got == expected, "multiples of a norm");
  for (const int64_t bucket : {7, 4097}) {
    check(qsgd(in, bucket, &got) ==
              "cgx_qsgd: bucket_size is " + std::to_string(bucket) + ", must be in [8, 4096]",
          "a bucket of " + std::to_string(bucket) + " is refused");
  }
  got.resize(kBatch * (kBytes + 1));
  check(qsgd(in, kBucket, &got) == "cgx_qsgd: size of payload is " + std::to_string(kBytes + 1) +
                                       ", expected " + std::to_string(kBytes),
        "a payload of another size is refused");
}

void largest_of_buckets(const Inputs& in) {
  constexpr int64_t kBucket = 96, kKeep = 5, kCount = (kValues + kBucket - 1) / kBucket * kKeep;
  std::vector<int32_t> at(kBatch * kCount), got_at(kBatch * kCount);
  std::vector<float> taken(kBatch * kCount), got(kBatch * kCount);
  for (int64_t b = 0; b < kBatch; ++b) {
    cgx::current_kernels().codes.largest_of_buckets(&in.x[b * kValues], kValues, kBucket, kKeep, 0,
                                                    kCount / kKeep, &at[b * kCount],
                                                    &taken[b * kCount]);
  }
  Frame frame;
  frame.arg(XLA_FFI_DataType_F32, in.x.data(), {kBatch, kValues})
      .ret(XLA_FFI_DataType_S32, got_at.data(), {kBatch, kCount})
      .ret(XLA_FFI_DataType_F32, got.data(), {kBatch, kCount})
      .attr("bucket_size", kBucket)
      .attr("keep", kKeep);
  const std::string said = execute(cgx::cuda_handlers(), "cgx_largest_of_buckets", frame);
  check(said.empty() && got_at == at && got == taken, "the largest of buckets");
}

void selection(const Inputs& in) {
  constexpr int64_t kCount = 40, kStride = 3, kRank = 14;
  const std::vector<int32_t> turns = {0, 500, 1000, 0, 7, 1000};
  std::vector<uint32_t> scratch(cgx::kScratchWords + 1);
  cgx::CallerAlone alone;
  for (const bool sampled : {false, true}) {
    const std::string target = sampled ? "cgx_above_sampled" : "cgx_largest";
    std::vector<int32_t> at(kBatch * kCount), got_at(kBatch * kCount);
    std::vector<float> taken(kBatch * kCount), got(kBatch * kCount);
    for (int64_t b = 0; b < kBatch; ++b) {
      const float* const x = &in.x[b * kValues];
      int32_t* const places = &at[b * kCount];
      float* const values = &taken[b * kCount];
      if (sampled) {
        cgx::above_sampled(x, kValues, kCount, &turns[2 * b], kStride, kRank, places, values);
      } else {
        cgx::largest(alone, x, kValues, kCount, places, values);
      }
    }
    const auto select = [&](int64_t words) {
      Frame frame;
      frame.arg(XLA_FFI_DataType_F32, in.x.data(), {kBatch, kValues});
      if (sampled) frame.arg(XLA_FFI_DataType_S32, turns.data(), {kBatch, 2});
      frame.ret(XLA_FFI_DataType_S32, got_at.data(), {kBatch, kCount})
          .ret(XLA_FFI_DataType_F32, got.data(), {kBatch, kCount})
          .ret(XLA_FFI_DataType_U32, scratch.data(), {words})
          .attr("count", kCount);
      if (sampled) frame.attr("stride", kStride).attr("rank", kRank);
      return execute(cgx::cuda_handlers(), target, frame);
    };
    check(select(cgx::kScratchWords).empty() && got_at == at && got == taken, target);
    check(select(cgx::kScratchWords + 1) == target + ": size of scratch is 6147, expected 6146",
          target + ": scratch of another size is refused");
  }
}

}  // namespace

int main() {
  const Inputs in;
  levels(in);
  largest_of_buckets(in);
  selection(in);
  return report();
}
