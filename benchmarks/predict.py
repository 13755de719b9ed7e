"""Predicted times of a reduction and of a training step on machines that we do not have.

    python benchmarks/predict.py

A model, not a measurement. A link's time is its bytes divided by its rate, and each collective has
a latency. A kernel's time is its bytes divided by the memory's rate, and a launch. Nothing
overlaps. fp32 is a ring in a node, and a tree between nodes, which sends less there. A node's GPUs
share its link. With levels the sums inside a node are exact.

The last lines say which way to train keeps the mean step within LIMIT times its computing, for 4
ranks with a link each: up to how many bits of gradients per second of computing, over the bits per
second of the link. Kernels take no time in them.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from alpha_beta import sent
from cgx_jax import Quantize

GRADIENTS = 100e6  # bytes of fp32
BITS = 4
MEMORY = 0.936e12  # bytes per second: an RTX 3090's data sheet
PCIE = 10e9  # bytes per second and GPU, each way: the usable part of 16 lanes of PCIe 3.0
NVLINK, A100 = 230e9, 1.5e12  # bytes per second and GPU: the usable part of NVLink 3 and of memory
LAUNCH = 5e-6  # seconds of a kernel, however small
INSIDE, BETWEEN = (
    25e-6,
    50e-6,
)  # seconds of a collective, however small, in a node and between nodes
BUCKET = 512
STEPS = (0.05, 0.2, 1.0)  # seconds that a step computes
PRICES = "fp32", "flat", "levels"
LIMIT = 1.1  # times its computing that a step may take
WORLD = 4
WAYS = {  # what a reduction sends, and the steps between two; the least change to training first
    "exact": ("fp32", 1),
    "4 bits": ("4 bits", 1),
    "DiLoCo, fp32": ("fp32", 32),
    "DiLoCo, 4 bits": ("4 bits", 32),
}


@dataclass(frozen=True)
class Machine:
    """`nodes` of `local` GPUs each; `link` between nodes and `inside` them in bytes per second."""

    name: str
    nodes: int
    local: int
    link: float
    inside: float = PCIE
    memory: float = MEMORY

    @property
    def world(self) -> int:
        return self.nodes * self.local


MACHINES = (
    Machine("8 GPUs on PCIe", 1, 8, PCIE),
    *(Machine(f"4 nodes × 8 GPUs, {rate} Gbit/s", 4, 8, rate / 8 * 1e9) for rate in (10, 25, 100)),
)


# What "auto" is held against, without a profile (tests/test_links.py).
FABRICS = (
    Machine("8 GPUs on NVLink", 1, 8, NVLINK, NVLINK, A100),
    Machine("8 GPUs on PCIe", 1, 8, PCIE),
    *(
        Machine(
            f"{nodes} nodes of 8 GPUs on NVLink, {rate} Gbit/s",
            nodes,
            8,
            rate / 8 * 1e9,
            NVLINK,
            A100,
        )
        for nodes in (2, 4)
        for rate in (25, 100)
    ),
    *(
        Machine(f"4 nodes of 8 GPUs on PCIe, {rate} Gbit/s", 4, 8, rate / 8 * 1e9)
        for rate in (25, 100)
    ),
    *(Machine(f"8 nodes of one GPU, {rate} Gbit/s", 8, 1, rate / 8 * 1e9) for rate in (25, 100)),
)


def bytes_per_value(world: int) -> float:
    """Bytes that a rank's kernels, NCCL's too, move per fp32 value of the whole buffer."""
    code, others = BITS / 8 + 8 / BUCKET, (world - 1) / world  # a bucket's range has 8 bytes
    encode, reduce, decode = others * (4 + code), (4 + world * code) / world, code + 4
    return encode + reduce + decode + 4 * others * code


def reduction_seconds(machine: Machine, how: str, gradients: float = GRADIENTS) -> float:
    """Seconds of one reduction of `gradients` bytes of fp32 by one of `PRICES`."""
    values = int(gradients / 4)
    world, local = machine.world, machine.local
    payload = Quantize(BITS).payload_bytes(values)
    slowest, latency = (machine.inside, INSIDE) if machine.nodes == 1 else (machine.link, BETWEEN)
    if how == "fp32":
        # A ring crosses each node's link once in each direction; a tree sends what nodes must send.
        ends = world if machine.nodes == 1 else machine.nodes
        return latency + 2 * (ends - 1) / ends * gradients / slowest
    if how == "flat":
        kernels = 3 * LAUNCH + values * bytes_per_value(world) / machine.memory
        crossing = sent("scatter_gather", values, world, BITS)
        if machine.nodes > 1:
            crossing = 2 * (world - local) / world * local * payload
        return 2 * latency + kernels + crossing / slowest
    kernels = 4 * LAUNCH + values / local * bytes_per_value(machine.nodes) / machine.memory
    inside = (local - 1) / local * (gradients + payload) / machine.inside
    between = 2 * (machine.nodes - 1) / machine.nodes * payload / machine.link
    return 2 * (INSIDE + BETWEEN) + kernels + inside + between


def step_speedup(machine: Machine, how: str, computing: float) -> float:
    """Returns how many times as fast a step is as one that reduces in fp32."""
    return (computing + reduction_seconds(machine, "fp32")) / (
        computing + reduction_seconds(machine, how)
    )


def way_for(computing: float, steps: Mapping[str, float]) -> str | None:
    """Returns the first of WAYS whose mean step is within LIMIT times the seconds of `computing`.

    `steps` holds the seconds of a step that reduces in fp32, and of one in 4 bits.
    """
    for way, (sends, every) in WAYS.items():
        if computing + (steps[sends] - computing) / every <= LIMIT * computing:
            return way
    return None


def reach(way: str) -> float:
    """Returns the most bits of gradients per second of computing, over a link's, for one of WAYS.

    In this model only the quotient counts.
    """
    sends, every = WAYS[way]
    nbytes = int(GRADIENTS)
    if sends == "fp32":
        crossing = 2 * (WORLD - 1) / WORLD * nbytes
    else:
        crossing = sent("scatter_gather", nbytes // 4, WORLD, BITS)
    return (LIMIT - 1) * every * nbytes / crossing


def main() -> int:
    for machine in MACHINES:
        for how in PRICES[: 2 if machine.nodes == 1 else 3]:
            milliseconds = reduction_seconds(machine, how) * 1e3
            steps = " ".join(f"{step_speedup(machine, how, c):5.2f}" for c in STEPS)
            print(f"{machine.name:<32} {how:<7} {milliseconds:7.1f} ms; steps {steps}")
    for way in WAYS:
        print(f"{way:<32} up to {reach(way):.3g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
