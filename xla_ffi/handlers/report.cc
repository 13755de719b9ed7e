#include "handlers/report.h"

#include <memory>
#include <mutex>
#include <utility>

#include "handlers/bind.h"

namespace cgx {
namespace {

using Numbers = ffi::Buffer<ffi::S32>;

std::mutex listener_mutex;
std::shared_ptr<const Listener> current;  // guarded by listener_mutex; calls hold their own copy

std::shared_ptr<const Listener> the_listener() {
  const std::lock_guard<std::mutex> lock(listener_mutex);
  return current;
}

ffi::Error report(const char* call, Numbers steps, Numbers ranks, Numbers table,
                  ffi::Result<Numbers> told, std::string_view text) {
  const int64_t batch = static_cast<int64_t>(steps.element_count());
  CGX_TRY(check_batch(call, batch));
  CGX_TRY(check_count(call, "ranks", ranks, batch));
  CGX_TRY(check_count(call, "the result", *told, 1));
  const int64_t size = static_cast<int64_t>(table.element_count());
  if (size == 0 || size % batch != 0) {
    return must_be(call, "size of table", size,
                   "a positive multiple of the batch of " + std::to_string(batch));
  }
  const std::shared_ptr<const Listener> listener = the_listener();
  if (!listener)
    return ffi::Error(ffi::ErrorCode::kInternal, std::string(call) + ": nobody listens");
  *told->typed_data() = 0;
  std::string failure =
      (*listener)({text, steps.typed_data(), ranks.typed_data(), table.typed_data(), batch, size});
  if (failure.empty()) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kInternal, std::move(failure));
}

}  // namespace

void set_listener(Listener listener) {
  auto next = std::make_shared<const Listener>(std::move(listener));
  const std::lock_guard<std::mutex> lock(listener_mutex);
  current.swap(next);
}

XLA_FFI_Error* report_handler(XLA_FFI_CallFrame* frame) {
  return named_call<report>(frame, "report", "text");
}

}  // namespace cgx
