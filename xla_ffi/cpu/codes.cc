// Compiled once for each instruction set. The rules of kernels.cc apply here too.
#include "cpu/codes.h"

#include <string.h>

#include "cpu/bucket_top_k.h"
#include "cpu/collect.h"
#include "cpu/levels.h"
#include "cpu/signs.h"

namespace cgx {
inline namespace CGX_ISA {

extern const CodeKernels kCodes;
const CodeKernels kCodes = {pack_signs, unpack_signs, collect, encode_buckets, largest_of_buckets};

}  // namespace CGX_ISA
}  // namespace cgx
