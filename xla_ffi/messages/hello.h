// The first message of every call: both sides say what they are about to do.
#ifndef CGX_MESSAGES_HELLO_H_
#define CGX_MESSAGES_HELLO_H_

#include <stdint.h>

#include <string>
#include <string_view>

#include "format/wire_format.h"

namespace cgx {

// The program that holds a call. It is needed because two programs number their calls alike.
struct Program {
  Program() = default;
  explicit Program(std::string_view label);

  uint64_t fingerprint = 0;  // of the whole label
  char name[64] = {};        // its beginning, for messages
};

// The text of a message, which need not be null-terminated, in a form that is safe for a terminal.
std::string shown(const char* begin, const char* end);

// What both sides of a message must agree on; sent before anything else.
struct Hello {
  uint64_t version;
  uint64_t fingerprint;  // of everything that decides what the bytes of a call mean
  int64_t total_bytes;
  int64_t segments;
  int64_t rank;
  Program program;
};

constexpr uint64_t kProtocol = 3;
constexpr uint64_t kHelloVersion = kProtocol << 32 | kWireVersion;

// FNV-1a.
class Fingerprint {
 public:
  template <typename T>
  void add(T value) {
    const uint64_t word = static_cast<uint64_t>(value);
    for (int i = 0; i < 8; ++i) hash_ = (hash_ ^ (word >> (8 * i) & 255)) * 0x100000001b3u;
  }
  uint64_t value() const { return hash_; }

 private:
  uint64_t hash_ = 0xcbf29ce484222325u;
};

// Describes how the hello of `peer` differs from this rank's; "" if they agree.
std::string disagreement(int64_t peer, const Hello& theirs, const Hello& own);

}  // namespace cgx

#endif  // CGX_MESSAGES_HELLO_H_
