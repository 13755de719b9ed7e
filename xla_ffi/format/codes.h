// What codes of values are, beside those of the wire format: for the kernels of both processors.
#ifndef CGX_FORMAT_CODES_H_
#define CGX_FORMAT_CODES_H_

#include <stdint.h>

namespace cgx {

// The longest bucket whose squares are added up, and whose largest values are searched.
constexpr int64_t kLongestBucket = 4096;

// What values become codes of: signed powers of two in 8 bits; three values, five in a byte; or
// `width` bits for 2 levels + 1 multiples of the bucket's norm / levels. Rounded at random.
enum class Coded { kNatural, kTernary, kSteps };

struct BucketsCall {
  Coded coded;
  const float* x;
  int64_t n;
  const uint32_t* key;  // two words
  uint8_t* codes;       // of all values, packed
  uint8_t* scales;      // a float for each bucket, where codes have scales
  int64_t bucket_size;
  int64_t levels = 0;
  bool l2 = false;  // the norm is L2, or else the largest
  int width = 0;    // 0: of three values
};

}  // namespace cgx

#endif  // CGX_FORMAT_CODES_H_
