// XLA's collectives extension, which lends a communicator.
#ifndef CGX_TESTS_HANDLERS_COLLECTIVES_EXTENSION_H_
#define CGX_TESTS_HANDLERS_COLLECTIVES_EXTENSION_H_

#include "handlers/frames.h"
#include "xla/ffi/api/collectives_c_api.h"

// The extension that lends `comm`, or says that there is none if that is null.
inline XLA_FFI_Collectives_Extension collectives(void* comm, int32_t major = 0, int32_t minor = 1) {
  XLA_FFI_Collectives_Extension extension = {};
  extension.extension_base = {XLA_FFI_Collectives_Extension_STRUCT_SIZE,
                              {XLA_FFI_Extension_Collectives, major, minor},
                              nullptr};
  extension.state = static_cast<XLA_FFI_CollectivesState*>(comm);
  extension.request_communicator = [](const XLA_FFI_Collectives_Extension*,
                                      XLA_FFI_Communicator_Request_Args*) -> XLA_FFI_Error* {
    return nullptr;
  };
  extension.get_communicator = [](const XLA_FFI_Collectives_Extension* self,
                                  XLA_FFI_Communicator_Get_Args* args) -> XLA_FFI_Error* {
    args->communicator = reinterpret_cast<XLA_FFI_Communicator*>(self->state);
    if (self->state) return nullptr;
    return new XLA_FFI_Error{"no clique", XLA_FFI_Error_Code_FAILED_PRECONDITION};
  };
  return extension;
}

#endif  // CGX_TESTS_HANDLERS_COLLECTIVES_EXTENSION_H_
