// The codes of values that are not part of the wire format, for the CPU and CUDA kernels.
#ifndef CGX_FORMAT_CODES_H_
#define CGX_FORMAT_CODES_H_

#include <stdint.h>

namespace cgx {

// The longest bucket for which kernels add up squares (the L2 norm) or search the largest values.
constexpr int64_t kLongestBucket = 4096;

// How values are encoded. All codes are rounded at random.
// kNatural: signed powers of two, 8 bits per code.
// kTernary: minus the scale, 0 or the scale, five codes per byte.
// kSteps: 2 * levels + 1 multiples of the bucket's norm / levels, `width` bits per code.
enum class Coded { kNatural, kTernary, kSteps };

struct BucketsCall {
  Coded coded;
  const float* x;
  int64_t n;
  const uint32_t* key;  // two words
  uint8_t* codes;       // of all values, packed
  uint8_t* scales;      // one float per bucket; unused if the codes have no scales
  int64_t bucket_size;
  int64_t levels = 0;
  bool l2 = false;  // true: the norm is L2; false: it is the largest magnitude
  int width = 0;    // bits per code; 0: five codes of three values per byte
};

}  // namespace cgx

#endif  // CGX_FORMAT_CODES_H_
