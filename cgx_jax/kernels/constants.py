"""Numbers that Python and the native modules must agree on.

Python keeps them because it also runs without the modules. `native` compares them with those that a
module exports (`xla_ffi/handlers/handlers.h`) when it loads the module.
"""

from __future__ import annotations

from cgx_jax.kernels import wire

LONGEST_BUCKET = 4096  # the longest bucket whose values a kernel keeps
SHORTEST_BUCKET = 8  # the shortest bucket that a warp takes
LONGEST_IN_UNITS = 512  # the longest bucket whose values a CUDA kernel multiplies by units
SCRATCH_WORDS = 6146  # scratch memory of a selection on CUDA, passed as its last result
ALIGNMENT = 128  # of the first byte of a message over NCCL
MOST_STREAMS = 8  # of a call over NCCL
MOST_PEERS = 32  # ranks of a call over peers' memory

# What each module exports, by name.
CPU = {
    "wire_version": wire.WIRE_VERSION,
    "header_bytes": wire.META_BYTES,
    "tail_values": wire.GROUP,
    "max_bits": wire.MAX_BITS,
    "mask_bits": wire.MASK_BITS,
    "longest_bucket": LONGEST_BUCKET,
}
CUDA = CPU | {
    "shortest_bucket": SHORTEST_BUCKET,
    "longest_in_units": LONGEST_IN_UNITS,
    "scratch_words": SCRATCH_WORDS,
    "alignment": ALIGNMENT,
    "most_streams": MOST_STREAMS,
    "most_peers": MOST_PEERS,
}
