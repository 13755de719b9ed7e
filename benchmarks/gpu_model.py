"""A model, not a measurement: bytes that the CUDA kernels move, and the least time they can take.

    python benchmarks/gpu_model.py --memory 3.35 --link 12.5

Counts what has to cross device memory once, for buckets of 512 fp32 values. encode reads values and
writes codes. reduce reads the owner's values and every peer's codes. decode reads codes and writes
values. `wire` is what NCCL's own kernels read to send and write on arrival. `ring` is the time that
an fp32 ring all-reduce needs for the same message on the same link.
"""

import argparse
import sys

BUCKET = 512


def payload(bits: int) -> float:
    """Bytes per value, including its share of the bucket's range."""
    return bits / 8 + 8 / BUCKET


def bytes_per_value(bits: int, world: int) -> dict[str, float]:
    """Bytes that one rank moves per value of the whole buffer."""
    p, others = payload(bits), (world - 1) / world
    return {
        "encode": others * (4 + p),
        "reduce": (4 + world * p) / world,
        "decode": p + 4,
        "wire": 4 * others * p,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--memory", type=float, default=3.35, help="TB/s (default %(default)s)")
    parser.add_argument("--link", type=float, default=12.5, help="GB/s (default %(default)s)")
    parser.add_argument("--megabytes", type=float, default=100.0, help="fp32 (default %(default)s)")
    arguments = parser.parse_args()
    values = arguments.megabytes * 1e6 / 4
    memory, link = arguments.memory, arguments.link
    print(f"{arguments.megabytes:g} MB, {memory:g} TB/s memory, {link:g} GB/s link")
    print("bits world | bytes/value: encode reduce decode wire | us: memory    link    ring")
    for bits in (4, 8):
        for world in (2, 4, 8):
            moved = bytes_per_value(bits, world)
            in_memory = values * sum(moved.values()) / (memory * 1e12)
            per_byte = 2 * (world - 1) / world * values / (link * 1e9)
            steps = " ".join(f"{moved[k]:6.2f}" for k in ("encode", "reduce", "decode"))
            print(
                f"{bits:>4} {world:>5} |              {steps} {moved['wire']:4.2f} |"
                f"     {in_memory * 1e6:6.0f} {per_byte * payload(bits) * 1e6:7.0f}"
                f" {per_byte * 4 * 1e6:7.0f}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
