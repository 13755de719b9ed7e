// XLA FFI handlers for the CPU platform. operands.h says what each takes and returns.
#ifndef CGX_HANDLERS_CPU_H_
#define CGX_HANDLERS_CPU_H_

#include "xla/ffi/api/c_api.h"

namespace cgx {

XLA_FFI_Error* encode_handler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* reduce_handler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* decode_handler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* accumulate_handler(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* find_nonfinite_handler(XLA_FFI_CallFrame* frame);

}  // namespace cgx

#endif  // CGX_HANDLERS_CPU_H_
