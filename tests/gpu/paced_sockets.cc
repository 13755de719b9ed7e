// Limits each TCP connection of a program to a rate, as clouds do:
//
//     c++ -shared -fPIC -o paced_sockets.so paced_sockets.cc
//     CGX_PACE=625000000 LD_PRELOAD=./paced_sockets.so PROGRAM    # bytes per second
//
// The kernel paces what a connection sends (SO_MAX_PACING_RATE). That needs no root and no queueing
// discipline.
#include <dlfcn.h>
#include <sys/socket.h>

#include <cstdint>
#include <cstdlib>

namespace {

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
