// Handmade call frames like those that XLA makes, and the functions of XLA's runtime that handlers
// call.
#ifndef CGX_TESTS_HANDLERS_FRAMES_H_
#define CGX_TESTS_HANDLERS_FRAMES_H_

#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "handlers/handlers.h"
#include "xla/ffi/api/c_api.h"

// Before version 0.4 there were no extensions, and the context had another name.
#if XLA_FFI_API_MAJOR == 0 && XLA_FFI_API_MINOR < 4
using XLA_FFI_InvokeContext = XLA_FFI_ExecutionContext;
using XLA_FFI_Error_GetDetails_Args = XLA_FFI_Error_GetMessage_Args;
#define CGX_FFI_EXTENSIONS 0
#else
#define CGX_FFI_EXTENSIONS 1
#endif

struct XLA_FFI_Error {
  std::string message;
  XLA_FFI_Error_Code code;
};
struct XLA_FFI_Future {
  bool ready = false;
  std::string error;
};

// XLA's threads as a handler sees them: a task runs where and when they like.
struct Threads {
  virtual ~Threads() = default;
  virtual int64_t count() const = 0;
  virtual void schedule(XLA_FFI_Task* task, void* data) = 0;
};

#if CGX_FFI_EXTENSIONS
struct XLA_FFI_InvokeContext {
#else
struct XLA_FFI_ExecutionContext {
#endif
  void* stream = nullptr;
  int32_t device = 0;
#if CGX_FFI_EXTENSIONS
  const XLA_FFI_Extension* extension = nullptr;
#endif
  Threads* threads = nullptr;  // null: the caller alone
  int64_t run = 0;
};

namespace {

XLA_FFI_Error* create_error(XLA_FFI_Error_Create_Args* args) {
  return new XLA_FFI_Error{args->message, args->errc};
}
void error_details(XLA_FFI_Error_GetDetails_Args* args) {
  args->message = args->error->message.c_str();
#if CGX_FFI_EXTENSIONS
  args->errc = args->error->code;
#endif
}
void destroy_error(XLA_FFI_Error_Destroy_Args* args) { delete args->error; }
XLA_FFI_Error* stream_of(XLA_FFI_Stream_Get_Args* args) {
  args->stream = args->ctx->stream;
  return nullptr;
}
XLA_FFI_Error* device_of(XLA_FFI_DeviceOrdinal_Get_Args* args) {
  args->device_ordinal = args->ctx->device;
  return nullptr;
}
XLA_FFI_Error* run_of(XLA_FFI_RunId_Get_Args* args) {
  args->run_id = args->ctx->run;
  return nullptr;
}
XLA_FFI_Error* threads_of(XLA_FFI_ThreadPool_NumThreads_Args* args) {
  *args->num_threads = args->ctx->threads ? args->ctx->threads->count() : 1;
  return nullptr;
}
XLA_FFI_Error* schedule(XLA_FFI_ThreadPool_Schedule_Args* args) {
  if (!args->ctx->threads) return new XLA_FFI_Error{"no threads", XLA_FFI_Error_Code_UNAVAILABLE};
  args->ctx->threads->schedule(args->task, args->data);
  return nullptr;
}

// One lock for all futures: the thread that completes a future does not touch it once it is ready.
std::mutex future_mutex;
std::condition_variable future_ready;

XLA_FFI_Error* create_future(XLA_FFI_Future_Create_Args* args) {
  args->future = new XLA_FFI_Future;
  return nullptr;
}
void complete(XLA_FFI_Future* future, std::string error) {
  const std::lock_guard<std::mutex> lock(future_mutex);
  future->error = std::move(error);
  future->ready = true;
  future_ready.notify_all();
}
XLA_FFI_Error* set_available(XLA_FFI_Future_SetAvailable_Args* args) {
  complete(args->future, "");
  return nullptr;
}
XLA_FFI_Error* set_error(XLA_FFI_Future_SetError_Args* args) {
  complete(args->future, args->error->message);
  delete args->error;
  return nullptr;
}
// Waits for a future and deletes it. Returns its error.
std::string outcome(XLA_FFI_Future* future) {
  std::string error;
  {
    std::unique_lock<std::mutex> lock(future_mutex);
    future_ready.wait(lock, [&] { return future->ready; });
    error = future->error;
  }
  delete future;
  return error;
}

#if CGX_FFI_EXTENSIONS
XLA_FFI_Error* find_extension(XLA_FFI_InvokeContext_FindExtension_Args* args) {
  const XLA_FFI_Extension* found = args->ctx->extension;
  args->extension = found && found->id.extension_type == args->extension_type ? found : nullptr;
  return nullptr;
}
#endif

XLA_FFI_Api make_api() {
  XLA_FFI_Api api = {};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR,
                     XLA_FFI_API_MINOR};
  api.XLA_FFI_Error_Create = create_error;
#if CGX_FFI_EXTENSIONS
  api.XLA_FFI_Error_GetDetails = error_details;
  api.XLA_FFI_InvokeContext_FindExtension = find_extension;
#else
  api.XLA_FFI_Error_GetMessage = error_details;
#endif
  api.XLA_FFI_Error_Destroy = destroy_error;
  api.XLA_FFI_Stream_Get = stream_of;
  api.XLA_FFI_DeviceOrdinal_Get = device_of;
  api.XLA_FFI_RunId_Get = run_of;
  api.XLA_FFI_ThreadPool_NumThreads = threads_of;
  api.XLA_FFI_ThreadPool_Schedule = schedule;
  api.XLA_FFI_Future_Create = create_future;
  api.XLA_FFI_Future_SetAvailable = set_available;
  api.XLA_FFI_Future_SetError = set_error;
  return api;
}
const XLA_FFI_Api api = make_api();

// A call frame: operands in order, attributes by name, as XLA sorts them.
class Frame {
 public:
  Frame& arg(XLA_FFI_DataType type, const void* data, std::vector<int64_t> dims) {
    args_.push_back(buffer(type, const_cast<void*>(data), std::move(dims)));
    return *this;
  }
  Frame& ret(XLA_FFI_DataType type, void* data, std::vector<int64_t> dims) {
    rets_.push_back(buffer(type, data, std::move(dims)));
    return *this;
  }
  Frame& attr(const std::string& name, std::vector<int64_t> values) {
    lists_.push_back(std::move(values));
    arrays_.push_back({XLA_FFI_DataType_S64, lists_.back().size(), lists_.back().data()});
    attrs_[name] = {XLA_FFI_AttrType_ARRAY, &arrays_.back()};
    return *this;
  }
  Frame& attr(const std::string& name, int64_t value) {
    integers_.push_back(value);
    scalars_.push_back({XLA_FFI_DataType_S64, &integers_.back()});
    attrs_[name] = {XLA_FFI_AttrType_SCALAR, &scalars_.back()};
    return *this;
  }
  Frame& attr(const std::string& name, float value) {
    floats_.push_back(value);
    scalars_.push_back({XLA_FFI_DataType_F32, &floats_.back()});
    attrs_[name] = {XLA_FFI_AttrType_SCALAR, &scalars_.back()};
    return *this;
  }
  Frame& attr(const std::string& name, const char* value) {
    spans_.push_back({value, std::strlen(value)});
    attrs_[name] = {XLA_FFI_AttrType_STRING, &spans_.back()};
    return *this;
  }
  // Calls a handler. Returns the error of the handler or of the future that it returns, or "".
  std::string call(XLA_FFI_Handler* handler, XLA_FFI_ExecutionStage stage,
                   XLA_FFI_InvokeContext* context) {
    std::vector<XLA_FFI_ArgType> arg_types(args_.size(), XLA_FFI_ArgType_BUFFER);
    std::vector<XLA_FFI_RetType> ret_types(rets_.size(), XLA_FFI_RetType_BUFFER);
    std::vector<void*> args(args_.begin(), args_.end()), rets(rets_.begin(), rets_.end());
    std::vector<XLA_FFI_AttrType> types;
    std::vector<XLA_FFI_ByteSpan> names;
    std::vector<void*> values;
    for (const auto& [name, value] : attrs_) {
      names.push_back({name.data(), name.size()});
      types.push_back(value.first);
      values.push_back(value.second);
    }
    std::vector<XLA_FFI_ByteSpan*> name_pointers;
    for (auto& name : names) name_pointers.push_back(&name);
    XLA_FFI_CallFrame frame = {};
    frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
    frame.api = &api;
    frame.ctx = context;
    frame.stage = stage;
    frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(args.size()),
                  arg_types.data(), args.data()};
    frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(rets.size()),
                  ret_types.data(), rets.data()};
    frame.attrs = {
        XLA_FFI_Attrs_STRUCT_SIZE, nullptr,      static_cast<int64_t>(values.size()), types.data(),
        name_pointers.data(),      values.data()};
    XLA_FFI_Error* const error = handler(&frame);
    const std::string message = error ? error->message : "";
    delete error;
    return !error && frame.future ? outcome(frame.future) : message;
  }

 private:
  XLA_FFI_Buffer* buffer(XLA_FFI_DataType type, void* data, std::vector<int64_t> dims) {
    lists_.push_back(std::move(dims));
    buffers_.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, type, data,
                        static_cast<int64_t>(lists_.back().size()), lists_.back().data()});
    return &buffers_.back();
  }
  std::vector<void*> args_, rets_;
  std::map<std::string, std::pair<XLA_FFI_AttrType, void*>> attrs_;
  std::deque<std::vector<int64_t>> lists_;
  std::deque<XLA_FFI_Buffer> buffers_;
  std::deque<XLA_FFI_Array> arrays_;
  std::deque<XLA_FFI_Scalar> scalars_;
  std::deque<XLA_FFI_ByteSpan> spans_;
  std::deque<int64_t> integers_;
  std::deque<float> floats_;
};

// Whether a handler says that XLA may record its calls into command buffers.
[[maybe_unused]] bool may_be_recorded(XLA_FFI_Handler* handler) {
  XLA_FFI_Metadata metadata = {};
  metadata.struct_size = XLA_FFI_Metadata_STRUCT_SIZE;
  XLA_FFI_Metadata_Extension extension = {};
  extension.extension_base.struct_size = XLA_FFI_Metadata_Extension_STRUCT_SIZE;
  extension.extension_base.type = XLA_FFI_Extension_Metadata;
  extension.metadata = &metadata;
  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.extension_start = &extension.extension_base;
  frame.api = &api;
  delete handler(&frame);
  return metadata.traits & XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE;
}

// Calls the handler of a target. Returns its error, or "".
[[maybe_unused]] std::string execute(const std::vector<cgx::Handler>& all,
                                     const std::string& target, Frame& frame,
                                     XLA_FFI_InvokeContext context = {}) {
  for (const cgx::Handler& handler : all) {
    if (handler.target != target) continue;
    return frame.call(handler.call, XLA_FFI_ExecutionStage_EXECUTE, &context);
  }
  return "no handler of " + target;
}

}  // namespace

#endif  // CGX_TESTS_HANDLERS_FRAMES_H_
