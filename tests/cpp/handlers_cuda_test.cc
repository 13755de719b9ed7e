// The CUDA handlers, driven by call frames made by hand as XLA makes them; everything below them is
// emulated. Needs the FFI headers of a jaxlib with the collectives extension.
#include "handlers_cuda.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <deque>
#include <map>

#include "cases.h"
#include "fused_cuda.h"
#include "handlers_nccl.h"
#include "xla/ffi/api/collectives_c_api.h"
#include "xla/ffi/api/ffi.h"

struct XLA_FFI_Error {
  std::string message;
  XLA_FFI_Error_Code code;
};
struct XLA_FFI_InvokeContext {
  cudaStream_t stream = nullptr;
  const XLA_FFI_Extension* extension = nullptr;
  bool memory = true;                     // whether there is any for scratch
  std::vector<void*> allocated = {};      // by the call
  std::vector<void*>* outlive = nullptr;  // where freed memory waits until the streams have run
};

namespace {

using Bytes = std::vector<uint8_t>;

// --- the runtime's functions

XLA_FFI_Error* create_error(XLA_FFI_Error_Create_Args* args) {
  return new XLA_FFI_Error{args->message, args->errc};
}
void error_details(XLA_FFI_Error_GetDetails_Args* args) {
  args->message = args->error->message.c_str();
  args->errc = args->error->code;
}
void destroy_error(XLA_FFI_Error_Destroy_Args* args) { delete args->error; }
XLA_FFI_Error* stream_of(XLA_FFI_Stream_Get_Args* args) {
  args->stream = args->ctx->stream;
  return nullptr;
}
XLA_FFI_Error* allocate(XLA_FFI_DeviceMemory_Allocate_Args* args) {
  if (!args->ctx->memory) {
    return new XLA_FFI_Error{"no memory", XLA_FFI_Error_Code_RESOURCE_EXHAUSTED};
  }
  args->data = std::aligned_alloc(256, (args->size + 255) / 256 * 256 + 256);
  return nullptr;
}
// Streams still use the memory, as on a device, where freeing is ordered by the stream.
XLA_FFI_Error* release(XLA_FFI_DeviceMemory_Free_Args* args) {
  args->ctx->outlive->push_back(args->data);
  return nullptr;
}
XLA_FFI_Error* find_extension(XLA_FFI_InvokeContext_FindExtension_Args* args) {
  const XLA_FFI_Extension* found = args->ctx->extension;
  args->extension = found && found->id.extension_type == args->extension_type ? found : nullptr;
  return nullptr;
}

XLA_FFI_Api make_api() {
  XLA_FFI_Api api = {};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR,
                     XLA_FFI_API_MINOR};
  api.XLA_FFI_Error_Create = create_error;
  api.XLA_FFI_Error_GetDetails = error_details;
  api.XLA_FFI_Error_Destroy = destroy_error;
  api.XLA_FFI_Stream_Get = stream_of;
  api.XLA_FFI_DeviceMemory_Allocate = allocate;
  api.XLA_FFI_DeviceMemory_Free = release;
  api.XLA_FFI_InvokeContext_FindExtension = find_extension;
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
  // What the handler says is wrong; "" when nothing is.
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
    return message;
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

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// --- codec

constexpr int64_t kWorld = 2, kValues = 1000, kBits = 4, kBucket = 64;

void with_layout(Frame& frame, int64_t bits = kBits) {
  frame.attr("bits", std::vector<int64_t>{bits})
      .attr("bucket_size", std::vector<int64_t>{kBucket})
      .attr("stochastic", std::vector<int64_t>{0})
      .attr("stream", std::vector<int64_t>{0})
      .attr("world", kWorld);
}

void codec() {
  std::mt19937 rng(1);
  std::normal_distribution<float> normal;
  std::vector<float> x(kValues);
  for (float& v : x) v = normal(rng);
  cgx::OwnedLayout owned;
  check(owned.build({{kValues, kBits, kBucket, 0, 0}}, kWorld).empty(), "codec: layout");
  const cgx::Layout layout = owned.view();
  const int64_t row = layout.chunk_bytes;
  const uint32_t key[2] = {1, 2};
  const int32_t rank = 1;
  Bytes payload(kWorld * row, 0xAA), expected(kWorld * row), chunk(row, 0xAA), expected_chunk(row);
  const cgx::DType dtype = cgx::DType::kF32;
  const void* in = x.data();
  const cgx::KernelTable& cpu = cgx::current_kernels();
  cpu.encode({layout, {&in, &dtype}, {}, key, rank, expected.data()}, 0, layout.total_bytes());
  XLA_FFI_InvokeContext context;
  const auto encode = [&](XLA_FFI_DataType type, int64_t bytes, int64_t bits) {
    Frame frame;
    frame.arg(XLA_FFI_DataType_U32, key, {2})
        .arg(XLA_FFI_DataType_S32, &rank, {})
        .arg(type, x.data(), {kValues})
        .ret(XLA_FFI_DataType_U8, payload.data(), {kWorld, bytes});
    with_layout(frame, bits);
    return frame.call(cgx::encode_cuda_handler, XLA_FFI_ExecutionStage_EXECUTE, &context);
  };
  check(encode(XLA_FFI_DataType_F32, row, kBits).empty(), "codec: encode");
  check(payload == expected, "codec: payload");
  check(has(encode(XLA_FFI_DataType_F32, row - 4, kBits), "cgx_encode: size of payload is"),
        "codec: a payload of another size is refused");
  check(has(encode(XLA_FFI_DataType_S32, row, kBits), "must be f32, bf16 or f16"),
        "codec: another dtype is refused");
  check(has(encode(XLA_FFI_DataType_F32, row, 9), "bits of leaf 0 is 9, must be in [1, 8]"),
        "codec: nine bits are refused");

  std::vector<float> scratch(owned.longest_bucket());
  cpu.reduce({layout,
              {&in, &dtype},
              key,
              rank,
              payload.data(),
              3.0f,
              expected_chunk.data(),
              scratch.data()},
             layout.begin[rank], layout.begin[rank + 1]);
  Frame reduce;
  reduce.arg(XLA_FFI_DataType_U32, key, {2})
      .arg(XLA_FFI_DataType_S32, &rank, {})
      .arg(XLA_FFI_DataType_U8, payload.data(), {kWorld, row})
      .arg(XLA_FFI_DataType_F32, x.data(), {kValues})
      .ret(XLA_FFI_DataType_U8, chunk.data(), {row})
      .attr("divisor", 3.0f);
  with_layout(reduce);
  check(reduce.call(cgx::reduce_cuda_handler, XLA_FFI_ExecutionStage_EXECUTE, &context).empty(),
        "codec: reduce");
  check(chunk == expected_chunk, "codec: chunk");
}

void kernels_may_be_recorded() {
  for (XLA_FFI_Handler* handler :
       {cgx::encode_cuda_handler, cgx::reduce_cuda_handler, cgx::decode_cuda_handler,
        cgx::accumulate_cuda_handler, cgx::all_reduce_nccl_execute}) {
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
    const bool recorded = metadata.traits & XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE;
    check(recorded == (handler != cgx::all_reduce_nccl_execute),
          "kernels may be recorded into command buffers, messages not");
  }
}

// --- the fused call

emulator::Comm comms[kWorld];
int comm_count, comm_state;

std::vector<std::string> requests;

XLA_FFI_Error* request(const XLA_FFI_Collectives_Extension*,
                       XLA_FFI_Communicator_Request_Args* args) {
  std::string text =
      std::to_string(args->group_mode) + "/" + std::to_string(args->communication_id);
  for (size_t g = 0; g < args->num_groups; ++g) {
    text += ":";
    for (size_t i = 0; i < args->groups[g].size; ++i) {
      text += " " + std::to_string(args->groups[g].ids[i]);
    }
  }
  requests.push_back(text);
  return nullptr;
}

XLA_FFI_Error* get(const XLA_FFI_Collectives_Extension* self, XLA_FFI_Communicator_Get_Args* args) {
  if (!self->state) {
    return new XLA_FFI_Error{"no clique", XLA_FFI_Error_Code_FAILED_PRECONDITION};
  }
  args->communicator = reinterpret_cast<XLA_FFI_Communicator*>(self->state);
  return nullptr;
}

struct Options {
  int32_t major = 0, minor = 2;
  bool extension = true, clique = true, memory = true;
  int count = kWorld, state = cgx::NcclLibrary::kSuccess;
  int64_t failing = -1;
};

// Both ranks' calls, Prepare and then Execute; the first error.
std::string fused(const Options& options, std::vector<std::vector<float>>* out) {
  emulator::reset();
  emulator::fail_at(options.failing);
  requests.clear();
  comm_count = options.count;
  comm_state = options.state;
  std::mt19937 rng(1);
  std::normal_distribution<float> normal;
  std::vector<std::vector<float>> in(kWorld, std::vector<float>(kValues));
  out->assign(kWorld, std::vector<float>(kValues, NAN));
  const uint32_t keys[4] = {1, 2, 3, 4};
  std::vector<void*> memory;
  std::string error;
  for (int r = 0; r < kWorld; ++r) {
    for (float& v : in[r]) v = normal(rng);
    comms[r] = {r, static_cast<int>(kWorld)};
    XLA_FFI_Collectives_Extension extension = {};
    extension.extension_base = {XLA_FFI_Collectives_Extension_STRUCT_SIZE,
                                {XLA_FFI_Extension_Collectives, options.major, options.minor},
                                nullptr};
    extension.request_communicator = request;
    extension.get_communicator = get;
    XLA_FFI_InvokeContext context;
    context.stream = emulator::create_stream();
    static int devices = 0;
    emulator::set_device(devices++);  // what a device keeps belongs to the streams of one run
    context.memory = options.memory;
    context.outlive = &memory;
    if (options.extension) context.extension = &extension.extension_base;
    Frame frame;
    frame.arg(XLA_FFI_DataType_U32, keys, {2, 2})
        .arg(XLA_FFI_DataType_F32, in[r].data(), {kValues})
        .ret(XLA_FFI_DataType_F32, (*out)[r].data(), {kValues})
        .attr("divisor", 2.0f)
        .attr("groups", std::vector<int64_t>{0, 1, 2, 3})
        .attr("segment_bytes", int64_t{100})
        .attr("name", "psum_compressed(exchange='nccl') over axis 'data'");
    with_layout(frame);
    for (const bool execute : {false, true}) {
      if (execute && options.clique) {
        extension.state = reinterpret_cast<XLA_FFI_CollectivesState*>(&comms[r]);
      }
      const std::string said = frame.call(
          execute ? cgx::all_reduce_nccl_execute : cgx::all_reduce_nccl_prepare,
          execute ? XLA_FFI_ExecutionStage_EXECUTE : XLA_FFI_ExecutionStage_PREPARE, &context);
      if (error.empty()) error = said;
    }
  }
  if (error.empty() && !emulator::run_streams(3)) error = "the streams wait for ever";
  for (void* p : memory) std::free(p);
  return error;
}

void fused_calls() {
  std::vector<std::vector<float>> out;
  for (const int32_t minor : {1, 2, 9}) {
    Options options;
    options.minor = minor;
    check(fused(options, &out).empty(), "fused: extension 0." + std::to_string(minor));
    check(std::memcmp(out[0].data(), out[1].data(), 4 * kValues) == 0 && out[0][0] == out[0][0],
          "fused: ranks agree");
    check(requests == std::vector<std::string>(2, "3/0: 0 1: 2 3"),
          "fused: asks for both groups, by flattened numbers");
  }
  const struct {
    const char* says;
    Options options;
  } refused[] = {
      {"Extension version mismatch", {1, 0}},
      {"Collectives not found", {0, 2, false}},
      {"no clique", {0, 2, true, false}},
      {"bytes of device memory for payloads", {0, 2, true, true, false}},
      {"size of the communicator is 3, expected 2", {0, 2, true, true, true, 3}},
      {"the communicator has failed: internal error", {0, 2, true, true, true, 2, 3}},
      {"over axis 'data': ncclSend: internal error", {0, 2, true, true, true, 2, 0, 1}},
  };
  for (const auto& c : refused) {
    const std::string said = fused(c.options, &out);
    check(has(said, c.says), std::string("fused: expected '") + c.says + "', got '" + said + "'");
  }
}

}  // namespace

namespace cgx {

const NcclLibrary* nccl_library(std::string*) {
  static const NcclLibrary library = [] {
    NcclLibrary l = {};
    l.get_error_string = [](int) { return "internal error"; };
    l.comm_count = [](NcclComm, int* count) {
      *count = comm_count;
      return NcclLibrary::kSuccess;
    };
    l.comm_user_rank = [](NcclComm comm, int* rank) {
      *rank = reinterpret_cast<emulator::Comm*>(comm)->rank;
      return NcclLibrary::kSuccess;
    };
    l.comm_get_async_error = [](NcclComm, int* state) {
      *state = comm_state;
      return NcclLibrary::kSuccess;
    };
    l.group_start = emulator::group_start;
    l.group_end = emulator::group_end;
    l.send = [](const void* data, size_t count, int, int peer, NcclComm comm, cudaStream_t stream) {
      return emulator::send(data, count, peer, reinterpret_cast<emulator::Comm*>(comm), stream);
    };
    l.recv = [](void* data, size_t count, int, int peer, NcclComm comm, cudaStream_t stream) {
      return emulator::recv(data, count, peer, reinterpret_cast<emulator::Comm*>(comm), stream);
    };
    return l;
  }();
  return &library;
}

}  // namespace cgx

int main() {
  codec();
  kernels_may_be_recorded();
  fused_calls();
  return report();
}
