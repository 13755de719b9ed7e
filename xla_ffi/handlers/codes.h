// XLA FFI handlers of cpu/codes.h, for the CPU platform. Operands and results lead with a batch.
#ifndef CGX_HANDLERS_CODES_H_
#define CGX_HANDLERS_CODES_H_

#include "xla/ffi/api/c_api.h"

namespace cgx {

XLA_FFI_Error* pack_signs_handler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* unpack_signs_handler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* largest_handler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* above_sampled_handler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* largest_of_buckets_handler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* scatter_sum_handler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* natural_handler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* ternary_handler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* qsgd_handler(XLA_FFI_CallFrame* frame);

}  // namespace cgx

#endif  // CGX_HANDLERS_CODES_H_
