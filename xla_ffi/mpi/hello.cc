#include "mpi/hello.h"

namespace cgx {
namespace {

std::string described(const Hello& h) {
  return std::to_string(h.total_bytes) + " bytes in " + std::to_string(h.segments) +
         " segments, version " + std::to_string(h.version) + ", plan " +
         std::to_string(h.fingerprint) + ", rank " + std::to_string(h.rank);
}

}  // namespace

std::string disagreement(int64_t peer, const Hello& theirs, const Hello& own) {
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
