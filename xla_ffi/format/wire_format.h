// Wire format version 2: where every byte of a fusion buffer's payload lies (docs/wire_format.md).
// Plain data with accessors, for host and device. Every accessor is always inlined, so that kernels
// compiled for different instruction sets share these types without sharing code.
#ifndef CGX_FORMAT_WIRE_FORMAT_H_
#define CGX_FORMAT_WIRE_FORMAT_H_

#include <stdint.h>

#if defined(__CUDACC__)
#define CGX_HD __host__ __device__ __forceinline__
#else
#define CGX_HD __attribute__((always_inline)) inline
#endif

namespace cgx {

constexpr int kWireVersion = 2;
constexpr int kRows = 8;  // a bucket is seen as 8 rows of codes; a column's codes make `bits` bytes
constexpr int kTailValues = 32;  // a short bucket is padded to a multiple of this many values
constexpr int kMaxBits = 8;

constexpr int kMaskBits = 16;    // of a record, for as many segments of its bucket
constexpr int kHeaderBytes = 8;  // of a record

// A bucket's range: the value of code 0 and the distance between two codes.
struct Meta {
  float lo;
  float unit;
};

enum class Rounding : uint8_t {
  kNearest,
  kStochastic,  // up with the probability of the fraction
  kCorrelated,  // the same, with noise spread evenly over the ranks
};

// One encoded bucket: a Header, then `bits` planes of `columns()` bytes.
struct Record {
  int64_t values;
  int32_t bits;

  CGX_HD constexpr int64_t columns() const {
    return (values + kTailValues - 1) / kTailValues * (kTailValues / kRows);
  }
  CGX_HD constexpr int64_t bytes() const { return kHeaderBytes + bits * columns(); }
  CGX_HD static uint8_t* planes(uint8_t* record) { return record + kHeaderBytes; }
  CGX_HD static const uint8_t* planes(const uint8_t* record) { return record + kHeaderBytes; }
};

// A leaf's place in a fusion buffer. Positions count bytes from the start of the buffer.
struct Slot {
  int64_t size;
  int64_t bucket_size;
  int32_t bits;
  Rounding rounding;
  bool rotated;     // codes are those of the rotated bucket
  int64_t segment;  // the values for which a bit of a record's mask stands
  uint32_t number;  // of the leaf: feeds its noise and its rotation's signs
  int64_t start;    // of the first record

  CGX_HD int64_t buckets() const { return size / bucket_size + (size % bucket_size != 0); }
  CGX_HD int64_t bucket_values(int64_t bucket) const {
    const int64_t rest = size - bucket * bucket_size;
    return rest < bucket_size ? rest : bucket_size;
  }
  CGX_HD Record record(int64_t bucket) const { return {bucket_values(bucket), bits}; }
  CGX_HD int64_t record_start(int64_t bucket) const {
    return start + bucket * Record{bucket_size, bits}.bytes();
  }
  CGX_HD int64_t bytes() const {
    const int64_t tail = size % bucket_size;
    return size / bucket_size * Record{bucket_size, bits}.bytes() +
           (tail ? Record{tail, bits}.bytes() : 0);
  }
  CGX_HD int64_t end() const { return start + bytes(); }
  // The first bucket whose record starts at or after `position`; buckets() when there is none.
  CGX_HD int64_t first_bucket_from(int64_t position) const {
    if (position <= start) return 0;
    const int64_t stride = Record{bucket_size, bits}.bytes();
    const int64_t bucket = (position - start + stride - 1) / stride;
    return bucket < buckets() ? bucket : buckets();
  }
};

// Slots in order, cut into `world` chunks at record starts. A view: the arrays belong to the
// caller.
struct Layout {
  const Slot* slots;
  int64_t num_slots;
  const int64_t*
      begin;  // world + 1 positions; chunk w holds the records from begin[w] to begin[w+1]
  int64_t world;
  int64_t chunk_bytes;  // of the longest chunk: the length of every payload row
  int64_t values;       // of all slots

  CGX_HD int64_t total_bytes() const { return begin[world]; }
  CGX_HD int64_t chunk_size(int64_t chunk) const { return begin[chunk + 1] - begin[chunk]; }
  // The chunk that holds the record at `position`.
  CGX_HD int64_t chunk_of(int64_t position) const {
    int64_t low = 0, high = world;
    while (high - low > 1) {
      const int64_t mid = low + (high - low) / 2;
      if (begin[mid] <= position)
        low = mid;
      else
        high = mid;
    }
    return low;
  }
  // The first slot that ends after `position`; num_slots when there is none.
  CGX_HD int64_t slot_at(int64_t position) const {
    int64_t low = 0, high = num_slots;
    while (low < high) {
      const int64_t mid = low + (high - low) / 2;
      if (slots[mid].end() > position)
        high = mid;
      else
        low = mid + 1;
    }
    return low;
  }
  // The first record that starts at or after `position`; total_bytes() when there is none.
  CGX_HD int64_t record_from(int64_t position) const {
    const int64_t s = slot_at(position);
    if (s == num_slots) return total_bytes();
    const Slot& slot = slots[s];
    const int64_t bucket = slot.first_bucket_from(position);
    return bucket < slot.buckets() ? slot.record_start(bucket) : slot.end();
  }
  // Where a record lies in a payload of `world` rows.
  CGX_HD int64_t payload_offset(int64_t chunk, int64_t position) const {
    return chunk * chunk_bytes + position - begin[chunk];
  }
};

// ceil(w * total / world), without overflow.
CGX_HD int64_t chunk_cut(int64_t w, int64_t total, int64_t world) {
  return total / world * w + (total % world * w + world - 1) / world;
}

}  // namespace cgx

#endif  // CGX_FORMAT_WIRE_FORMAT_H_
