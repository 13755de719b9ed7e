// Checks that all handlers share. Error messages name the wrong value and its limit.
#ifndef CGX_HANDLERS_CHECKS_H_
#define CGX_HANDLERS_CHECKS_H_

#include <cmath>
#include <exception>
#include <new>
#include <string>

#include "format/layout.h"
#include "xla/ffi/api/ffi.h"

namespace cgx {

namespace ffi = xla::ffi;

using Ints = ffi::Span<const int64_t>;

inline ffi::Error invalid(const std::string& call, const std::string& text) {
  return ffi::Error::InvalidArgument(call + ": " + text);
}

#define CGX_TRY(expression) \
  if (ffi::Error error = (expression); error.failure()) return error

template <typename Value>
ffi::Error must_be(const std::string& call, const std::string& what, Value value,
                   const std::string& limit) {
  return invalid(call, what + " is " + std::to_string(value) + ", must be " + limit);
}

inline std::string expected(const std::string& what, int64_t value, int64_t limit) {
  return what + " is " + std::to_string(value) + ", expected " + std::to_string(limit);
}

template <typename Buffer>
ffi::Error check_count(const std::string& call, const std::string& what, const Buffer& buffer,
                       int64_t limit) {
  const int64_t count = static_cast<int64_t>(buffer.element_count());
  if (count == limit) return ffi::Error::Success();
  return invalid(call, expected("size of " + what, count, limit));
}

inline ffi::Error check_number(const std::string& call, const std::string& what, size_t number,
                               size_t limit) {
  if (number == limit) return ffi::Error::Success();
  return invalid(call, expected("number of " + what, number, limit));
}

inline ffi::Error check_within(const std::string& call, const std::string& what, int64_t value,
                               int64_t most, int64_t least = 1) {
  if (value >= least && value <= most) return ffi::Error::Success();
  return must_be(call, what, value,
                 "in [" + std::to_string(least) + ", " + std::to_string(most) + "]");
}

inline ffi::Error check_batch(const std::string& call, int64_t batch) {
  return batch > 0 ? ffi::Error::Success() : invalid(call, expected("batch", batch, 1));
}

inline ffi::Error check_world(const std::string& call, int64_t world,
                              const std::string& what = "world") {
  if (world >= 1 && world <= kMaxWorld) return ffi::Error::Success();
  return must_be(call, what, world, "in [1, 2^20]");
}

// Checks `groups`, the mesh positions of all groups, with `world` positions per group.
inline ffi::Error check_groups(const std::string& call, Ints groups, int64_t world) {
  if (groups.size() > 0 && groups.size() % world == 0) return ffi::Error::Success();
  return must_be(call, "size of groups", groups.size(),
                 "a positive multiple of world, " + std::to_string(world));
}

inline ffi::Error check_divisor(const std::string& call, float divisor) {
  if (std::isfinite(divisor) && divisor != 0.0f) return ffi::Error::Success();
  return must_be(call, "divisor", divisor, "finite and not 0");
}

template <typename F>
ffi::Error no_throw(const char* call, F&& f) {
  try {
    return f();
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, std::string(call) + ": out of memory");
  } catch (const std::exception& error) {
    return ffi::Error(ffi::ErrorCode::kInternal, std::string(call) + ": " + error.what());
  }
}

}  // namespace cgx

#endif  // CGX_HANDLERS_CHECKS_H_
