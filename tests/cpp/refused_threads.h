// Makes the system refuse threads. Process limits cannot do this: they do not hold for root, and
// sanitizers need the address space. Included by one source of a program.
#ifndef CGX_TESTS_REFUSED_THREADS_H_
#define CGX_TESTS_REFUSED_THREADS_H_

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>

#include <atomic>
#include <cstdint>

namespace {

// Threads that the process may still start.
std::atomic<int64_t> threads_left{INT64_MAX};

}  // namespace

// The C++ library finds this function before the C library's or the sanitizer's.
extern "C" __attribute__((visibility("default"))) int pthread_create(
    pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*), void* data) noexcept {
  static const auto real =
      reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  if (threads_left.fetch_sub(1) <= 0) return EAGAIN;
  return real(thread, attributes, run, data);
}

#endif  // CGX_TESTS_REFUSED_THREADS_H_
