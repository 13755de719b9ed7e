// Memory in which the CPU kernels stage a bucket's values.
#ifndef CGX_CPU_SCRATCH_H_
#define CGX_CPU_SCRATCH_H_

#include <stdint.h>

#include <vector>

namespace cgx {

// Room for `values` values for each of `workers`. Each worker's room starts at a cache line.
class Scratch {
 public:
  Scratch(int64_t workers, int64_t values)
      : stride_((values + kLine - 1) / kLine * kLine), values_(workers * stride_ + kLine) {}
  float* of(int64_t worker) {
    const auto start = reinterpret_cast<uintptr_t>(values_.data()) / sizeof(float);
    return values_.data() + (kLine - start % kLine) % kLine + worker * stride_;
  }

 private:
  static constexpr int64_t kLine = 16;  // values
  int64_t stride_;
  std::vector<float> values_;
};

}  // namespace cgx

#endif  // CGX_CPU_SCRATCH_H_
