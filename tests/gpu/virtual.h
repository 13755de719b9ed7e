// What the programs that run several ranks on one GPU share.
#ifndef CGX_TESTS_GPU_VIRTUAL_H_
#define CGX_TESTS_GPU_VIRTUAL_H_

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "format/layout.h"

[[noreturn]] inline void fail(const std::string& what) {
  std::fprintf(stderr, "virtual ranks: %s\n", what.c_str());
  std::exit(2);
}

inline void require(cudaError_t error, const char* what) {
  if (error != cudaSuccess) fail(std::string(what) + ": " + cudaGetErrorString(error));
}
#define CGX_REQUIRE(call) require((call), #call)

using Values = std::vector<float>;

// The same steps one after the other on the CPU.
inline Values on_cpu(const cgx::Layout& layout, int64_t scratch_values,
                     const std::vector<Values>& inputs, const uint32_t* keys, float divisor) {
  const cgx::KernelTable& cpu = cgx::current_kernels();
  const cgx::DType dtype = cgx::DType::kF32;
  const int64_t world = layout.world, row = layout.chunk_bytes;
  std::vector<std::vector<uint8_t>> sent(world, std::vector<uint8_t>(world * row));
  std::vector<float> scratch(scratch_values);
  for (int64_t r = 0; r < world; ++r) {
    const void* in = inputs[r].data();
    cpu.encode({layout, {&in, &dtype}, {}, keys, r, sent[r].data(), scratch.data()}, 0,
               layout.total_bytes());
  }
  std::vector<uint8_t> gathered(world * row), received(world * row);
  for (int64_t r = 0; r < world; ++r) {
    for (int64_t p = 0; p < world; ++p) {
      std::memcpy(received.data() + p * row, sent[p].data() + r * row, row);
    }
    const void* in = inputs[r].data();
    cpu.reduce({layout,
                {&in, &dtype},
                keys + 2,
                r,
                received.data(),
                divisor,
                gathered.data() + r * row,
                scratch.data(),
                {}},
               layout.begin[r], layout.begin[r + 1]);
  }
  Values result(inputs[0].size());
  void* out = result.data();
  cpu.decode({layout, gathered.data(), {&out, &dtype}, scratch.data()}, 0, layout.total_bytes());
  return result;
}

// The same in one phase.
inline Values on_cpu_in_one_phase(const std::vector<Values>& inputs, const uint32_t* keys,
                                  float divisor) {
  const cgx::KernelTable& cpu = cgx::current_kernels();
  const cgx::DType dtype = cgx::DType::kF32;
  const int64_t world = static_cast<int64_t>(inputs.size());
  cgx::OwnedLayout owned;
  const auto count = static_cast<int64_t>(inputs[0].size());
  if (const auto error = owned.build({{count, 4, 512, 0, 0}}, 1); !error.empty()) fail(error);
  const cgx::Layout layout = owned.view();
  std::vector<uint8_t> payloads(world * layout.chunk_bytes);
  std::vector<float> scratch(owned.scratch_values());
  for (int64_t r = 0; r < world; ++r) {
    const void* in = inputs[r].data();
    uint8_t* const payload = payloads.data() + r * layout.chunk_bytes;
    cpu.encode({layout, {&in, &dtype}, {}, keys, -1, payload, scratch.data()}, 0,
               layout.total_bytes());
  }
  const Values zeros(count);
  Values result(count);
  const void* in = zeros.data();
  void* out = result.data();
  cpu.accumulate(
      {layout, {&in, &dtype}, payloads.data(), world, -1, divisor, {&out, &dtype}, scratch.data()},
      0, layout.total_bytes());
  return result;
}

// An all-reduce of one leaf, in one phase or two, with nearest rounding at 4 bits, and its expected
// result.
struct Problem {
  static constexpr uint32_t kKeys[4] = {1, 2, 3, 4};
  static constexpr cgx::DType kType = cgx::DType::kF32;

  int64_t world, count;
  bool one_phase;
  std::vector<cgx::DType> types;  // of the leaf; in one phase, repeated for each rank
  cgx::OwnedLayout owned;
  std::vector<Values> inputs, outputs;

  Problem(int64_t world, int64_t count, bool one_phase = false)
      : world(world),
        count(count),
        one_phase(one_phase),
        types(one_phase ? world : 1, kType),
        inputs(world, Values(count)),
        outputs(world, Values(count)) {
    const std::vector<cgx::SlotSpec> leaves(types.size(), {count, 4, 512, 0, 0});
    if (const auto error = owned.build(leaves, world); !error.empty()) fail(error);
    std::mt19937 rng(1);
    std::normal_distribution<float> normal;
    for (auto& rank : inputs) {
      for (float& x : rank) x = normal(rng);
    }
  }
  float divisor() const { return static_cast<float>(world); }

  // Prints a line of JSON that includes `how`. Returns the exit status of the process.
  int report(const std::string& how, const std::vector<std::vector<float>>& milliseconds) const {
    const Values expected =
        one_phase ? on_cpu_in_one_phase(inputs, kKeys, divisor())
                  : on_cpu(owned.view(), owned.scratch_values(), inputs, kKeys, divisor());
    const auto same = [&](const Values& a, const Values& b) {
      return std::memcmp(a.data(), b.data(), count * 4) == 0;
    };
    bool agree = true;
    for (const auto& out : outputs) agree = agree && same(out, outputs[0]);
    const bool right = same(outputs[0], expected);
    std::vector<float> slowest(milliseconds[0].size());
    for (size_t i = 0; i < slowest.size(); ++i) {
      for (const auto& rank : milliseconds) slowest[i] = std::max(slowest[i], rank[i]);
    }
    std::nth_element(slowest.begin(), slowest.begin() + slowest.size() / 2, slowest.end());
    std::printf(
        "{\"world\": %ld, \"values\": %ld, %s, \"ranks_agree\": %s, \"equals_cpu\": %s, "
        "\"milliseconds\": %.4f}\n",
        static_cast<long>(world), static_cast<long>(count), how.c_str(), agree ? "true" : "false",
        right ? "true" : "false", slowest[slowest.size() / 2]);
    return agree && right ? 0 : 1;
  }
};

// A rank's buffers on the device, its stream, and two events around a call.
struct Buffers {
  void *in, *out, *keys;
  cudaStream_t stream;
  cudaEvent_t begin, end;

  explicit Buffers(const Values& values) {
    const size_t bytes = values.size() * 4;
    CGX_REQUIRE(cudaMalloc(&in, bytes));
    CGX_REQUIRE(cudaMalloc(&out, bytes));
    CGX_REQUIRE(cudaMalloc(&keys, sizeof(Problem::kKeys)));
    CGX_REQUIRE(cudaMemset(out, 0xFF, bytes));
    CGX_REQUIRE(cudaMemcpy(in, values.data(), bytes, cudaMemcpyHostToDevice));
    CGX_REQUIRE(cudaMemcpy(keys, Problem::kKeys, sizeof(Problem::kKeys), cudaMemcpyHostToDevice));
    CGX_REQUIRE(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CGX_REQUIRE(cudaEventCreate(&begin));
    CGX_REQUIRE(cudaEventCreate(&end));
  }
  // Waits for the call between the events. Returns its milliseconds.
  float wait() const {
    float took;
    CGX_REQUIRE(cudaStreamSynchronize(stream));
    CGX_REQUIRE(cudaEventElapsedTime(&took, begin, end));
    return took;
  }
  void copy_to(Values* values) const {
    CGX_REQUIRE(cudaMemcpy(values->data(), out, values->size() * 4, cudaMemcpyDeviceToHost));
  }
};

#endif  // CGX_TESTS_GPU_VIRTUAL_H_
