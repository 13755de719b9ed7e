#include "messages/hello.h"

#include <algorithm>
#include <iterator>

namespace cgx {
namespace {

std::string described(const Hello& h) {
  return std::to_string(h.total_bytes) + " bytes in " + std::to_string(h.segments) +
         " segments, version " + std::to_string(h.version) + ", plan " +
         std::to_string(h.fingerprint) + ", rank " + std::to_string(h.rank);
}

std::string named(const Program& program) { return shown(program.name, std::end(program.name)); }

}  // namespace

std::string shown(const char* begin, const char* end) {
  std::string text(begin, std::find(begin, end, '\0'));
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return (c < ' ' && c != '\n') || c > '~'; },
      '?');
  return text;
}

Program::Program(std::string_view label) {
  Fingerprint whole;
  for (const char letter : label) whole.add(static_cast<unsigned char>(letter));
  fingerprint = whole.value();
  std::copy_n(label.begin(), std::min(label.size(), sizeof(name)), name);
}

std::string disagreement(int64_t peer, const Hello& theirs, const Hello& own) {
  if (theirs.version == own.version && theirs.program.fingerprint != own.program.fingerprint) {
    return "rank " + std::to_string(peer) + " is in another program (" + named(theirs.program) +
           ") than this rank (" + named(own.program) +
           "), so no gradient was sent; every rank must start the same programs, with the same "
           "leaves, compressors and constants, in the same order, and from one thread";
  }
  if (theirs.version == own.version && theirs.fingerprint == own.fingerprint &&
      theirs.total_bytes == own.total_bytes && theirs.segments == own.segments &&
      theirs.rank == peer) {
    return "";
  }
  return "rank " + std::to_string(peer) + " is in another call (" + described(theirs) +
         ") than this rank (" + described(own) +
         "), so no gradient was sent; every rank must run the same program with the same leaves, "
         "compressor, widths and settings";
}

}  // namespace cgx
