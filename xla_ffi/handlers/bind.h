// Makes handlers of functions, whose parameters say by their types how they are bound: operands,
// results, parts of the call's context, or else attributes.
#ifndef CGX_HANDLERS_BIND_H_
#define CGX_HANDLERS_BIND_H_

#include <type_traits>
#include <utility>

#include "handlers/checks.h"

namespace cgx {

// Binds `f`, whose remaining parameters are T and Rest. `names` are those of their attributes.
template <typename F, typename Binding>
auto bind_all(F f, ffi::Traits traits, const char* const*, Binding&& binding) {
  return binding.To(std::move(f), {traits});
}
template <typename T, typename... Rest, typename F, typename Binding>
auto bind_all(F f, ffi::Traits traits, const char* const* names, Binding&& binding) {
  using Operand = typename ffi::ArgBinding<T>::Arg;
  using Result = typename ffi::RetBinding<T>::Ret;
  const auto rest = [&](auto&& next) {
    return bind_all<Rest...>(std::move(f), traits, names, std::move(next));
  };
  if constexpr (std::is_same_v<T, ffi::RemainingArgs>) {
    return rest(std::move(binding).RemainingArgs());
  } else if constexpr (std::is_same_v<T, ffi::RemainingRets>) {
    return rest(std::move(binding).RemainingRets());
  } else if constexpr (!std::is_void_v<Operand>) {
    return rest(std::move(binding).template Arg<Operand>());
  } else if constexpr (!std::is_void_v<Result>) {
    return rest(std::move(binding).template Ret<Result>());
  } else if constexpr (std::is_pointer_v<T>) {
    return rest(std::move(binding).template Ctx<ffi::PlatformStream<T>>());
  } else if constexpr (std::is_same_v<T, ffi::RunId> || std::is_same_v<T, ffi::ThreadPool>) {
    return rest(std::move(binding).template Ctx<T>());
  } else {
    return rest(std::move(binding).template Attr<T>(*names++));
  }
}

template <typename Outcome, typename... T>
auto bound(Outcome (*f)(T...), ffi::Traits traits, const char* const* names) {
  return bind_all<T...>(f, traits, names, ffi::Ffi::Bind());
}
// A function that takes the call's name first, and may throw.
template <typename... T>
auto bound(ffi::Error (*f)(const char*, T...), const char* name, ffi::Traits traits,
           const char* const* names) {
  const auto named = [=](const T&... given) {
    return no_throw(name, [&] { return f(name, given...); });
  };
  return bind_all<T...>(named, traits, names, ffi::Ffi::Bind());
}

// Calls the handler of a function with these attributes.
template <auto kFunction, typename... Names>
XLA_FFI_Error* call(XLA_FFI_CallFrame* frame, Names... names) {
  const char* const all[] = {names..., nullptr};
  static const auto handler = bound(kFunction, ffi::Traits{}, all);
  return handler->Call(frame);
}
template <auto kFunction, ffi::Traits kTraits = ffi::Traits{}, typename... Names>
XLA_FFI_Error* named_call(XLA_FFI_CallFrame* frame, const char* name, Names... names) {
  const char* const all[] = {names..., nullptr};
  static const auto handler = bound(kFunction, name, kTraits, all);
  return handler->Call(frame);
}

}  // namespace cgx

#endif  // CGX_HANDLERS_BIND_H_
