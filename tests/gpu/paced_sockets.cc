// Limits what a program sends over TCP: each connection, as clouds do, or all of them together, as
// a network card does.
//
//     c++ -shared -fPIC -o paced_sockets.so paced_sockets.cc
//     CGX_PACE=625000000 LD_PRELOAD=./paced_sockets.so PROGRAM    # bytes per second
//
// The kernel paces what a connection sends (SO_MAX_PACING_RATE). That needs no root and no queueing
// discipline. A program limits the bytes of all its `send` calls by `cgx_pace_program`, at any
// time: a call then sends no more than has accumulated, which NCCL's sockets expect of any call.
#include <dlfcn.h>
#include <errno.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <thread>

namespace {

// What may go out at once: little beside a message, much beside the time between two calls.
constexpr double kBurst = 1024 * 1024, kLeast = 64 * 1024;

std::atomic<double> program_rate{0};  // bytes per second; 0: no limit

double now() {
  const auto time = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(time).count();
}

// Returns how many of `bytes` may be sent now, and takes them.
size_t take(size_t bytes, double rate) {
  static std::mutex mutex;
  static double tokens = 0, at = now();
  const std::lock_guard<std::mutex> lock(mutex);
  const double time = now();
  tokens = std::min(kBurst, tokens + (time - at) * rate);
  at = time;
  const double taken = std::min(tokens, static_cast<double>(bytes));
  if (taken < std::min(kLeast, static_cast<double>(bytes))) return 0;
  tokens -= taken;
  return static_cast<size_t>(taken);
}

void pace(int socket) {
  const char* const text = std::getenv("CGX_PACE");
  const uint64_t rate = text ? std::strtoull(text, nullptr, 10) : 0;
  // Fails for sockets that are not TCP's; these are not limited.
  if (rate) setsockopt(socket, SOL_SOCKET, SO_MAX_PACING_RATE, &rate, sizeof rate);
}

template <typename Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

void cgx_pace_program(double bytes_per_second) { program_rate = bytes_per_second; }

ssize_t send(int socket, const void* data, size_t bytes, int flags) {
  static auto* const real = next<decltype(send)>("send");
  const double rate = program_rate;
  if (rate == 0 || bytes == 0) return real(socket, data, bytes, flags);
  size_t taken = 0;
  while ((taken = take(bytes, rate)) == 0) {
    if (flags & MSG_DONTWAIT) {
      errno = EAGAIN;
      return -1;
    }
    std::this_thread::yield();
  }
  return real(socket, data, taken, flags);
}

int connect(int socket, const sockaddr* to, socklen_t length) {
  static auto* const real = next<decltype(connect)>("connect");
  pace(socket);
  return real(socket, to, length);
}

int accept(int socket, sockaddr* from, socklen_t* length) {
  static auto* const real = next<decltype(accept)>("accept");
  const int made = real(socket, from, length);
  if (made >= 0) pace(made);
  return made;
}

int accept4(int socket, sockaddr* from, socklen_t* length, int flags) {
  static auto* const real = next<decltype(accept4)>("accept4");
  const int made = real(socket, from, length, flags);
  if (made >= 0) pace(made);
  return made;
}

}  // extern "C"
