"""A model of one multiprocessor of an H100 or H200, cycle by cycle, on traces of warps.

Stalls and scoreboards are read off the machine code. Four schedulers issue an instruction a cycle
each, pipes have their rates, and memory is a queue at the multiprocessor's share of its bandwidth
with a latency behind it. All blocks follow the traces of one. docs/gpu.md says how far the numbers
are from measured ones.
"""

import dataclasses
import math
import random
from collections import Counter

from warp import SECTOR, Issued

PROCESSORS, SCHEDULERS = 132, 4
CLOCK = 1.755e9
# Cycles for which a warp's instruction keeps a scheduler's pipe busy, and one that the four share.
PIPE_CYCLES = {"alu": 2, "xu": 8, "ldc": 2, "fmaheavy": 2, "fma": 2}
SHARED_CYCLES = {"shfl": 1, "redux": 2}
LSU_SECTORS = 4  # that the first-level cache takes a cycle
LSU_QUEUE = 40  # cycles of requests that wait in front of it
# Cycles from the issue of an instruction to its result, where it is a scoreboard's to tell.
LATENCY = {"ldc": 38, "xu": 30, "shfl": 24, "redux": 30, "lsu": 20, "uniform": 12}
NEAR_LATENCY = 40  # of a load that the first-level cache has
MEMORY_LATENCY = 700
READ_LATENCY = 12  # until the operands have been read
JUMP_CYCLES = 6  # until a warp goes on after a jump
JUMPS = ("BRA", "BSYNC", "CALL", "RET", "EXIT")
BLOCK_START = 200  # cycles from the end of a block to the first instruction of the next
# Fitted to shares that an H100 has reached.
JITTER = 0.8  # how far the latency of memory spreads
WRITE_COST = 0.04  # a byte written costs that much more than half of a copy, one read so much less

LEAST_STEPS, LEAST_WAVES = 250_000, 4  # how much is simulated; a wave is what runs at once
NONE = 7  # no scoreboard


@dataclasses.dataclass(frozen=True)
class Machine:
    """What differs between GPUs of one architecture: how fast they copy within the device."""

    name: str
    copy: float  # bytes per second, read and written; measured by tests/gpu/kernel_bench.cc

    @property
    def rate(self) -> float:
        """Bytes that memory moves for one multiprocessor in a cycle."""
        return self.copy / PROCESSORS / CLOCK

    def copy_cycles(self, moved: float) -> float:
        """Cycles of a scheduler that a copy of that many bytes takes."""
        return SCHEDULERS * moved / self.rate


MACHINES = (Machine("H100", 2.971e12), Machine("H200", 4.166e12))


@dataclasses.dataclass(slots=True)
class Step:
    """An instruction of the trace with what it costs."""

    pipe: str
    stall: int
    wait: tuple[int, ...]  # scoreboards
    write: int
    read: int
    latency: int
    busy: int  # cycles of the pipe
    moved: float = 0.0  # by memory, as bytes of a copy
    loads: bool = False  # from memory


def steps(trace: list[Issued], moved: int) -> list[Step]:
    """A warp's trace as what it costs, where the warp has to move so many bytes.

    They are spread over the accesses by their sectors: what neighbors share is moved once.
    """
    scale = moved / sum(SECTOR * i.sectors for i in trace if not i.near)
    result = []
    for issued in trace:
        i, control = issued.instruction, issued.instruction.control
        stores = i.name == "STG"
        far = 0 if issued.near else SECTOR * issued.sectors * scale
        pipe = "control" if i.pipe == "lsu" and not issued.sectors else i.pipe
        busy = {**PIPE_CYCLES, **SHARED_CYCLES, "lsu": max(1, issued.sectors // LSU_SECTORS)}
        result.append(
            Step(
                pipe,
                max(control.stall, 1) + JUMP_CYCLES * (i.name in JUMPS),
                tuple(k for k in range(6) if control.wait >> k & 1),
                control.write,
                control.read,
                NEAR_LATENCY if issued.near else LATENCY.get(pipe, 20),
                busy.get(pipe, 0),
                far * (1 + WRITE_COST if stores else 1 - WRITE_COST),
                far > 0 and not stores,
            )
        )
    return result


def busy_cycles(steps: list[Step]) -> dict[str, int]:
    """Cycles for which a trace keeps each pipe busy, as one of four schedulers sees it."""
    count = Counter(step.pipe for step in steps)
    shared = {pipe: SCHEDULERS * n for pipe, n in SHARED_CYCLES.items()}
    return {pipe: n * count[pipe] for pipe, n in (PIPE_CYCLES | shared).items()}


@dataclasses.dataclass(slots=True, eq=False)
class Resident:
    """A warp on the multiprocessor: where it is in its trace, and when its results are there."""

    trace: list[Step]
    block: int
    ready: float
    at: int = 0
    boards: list[float] = dataclasses.field(default_factory=lambda: [0.0] * 6)


class Multiprocessor:
    """Runs blocks whose warps follow these traces."""

    def __init__(self, traces: list[list[Step]], machine: Machine) -> None:
        self.traces, self.rate = traces, machine.rate
        self.queues: list[list[Resident]] = [[] for _ in range(SCHEDULERS)]
        # When a pipe takes its next instruction: those of a scheduler, then what all four share.
        # "light" are the multiply-adders that integers do not use.
        pipes = ("alu", "xu", "ldc", "fmaheavy", "light")
        self.free = [dict.fromkeys(pipes, 0.0) for _ in range(SCHEDULERS)]
        self.shuffle = self.lsu = self.memory = 0.0
        self.left: list[int] = []  # warps that each block still has
        self.random = random.Random(1)

    def ends(self, blocks: int, at_once: int) -> list[float]:
        """The cycle in which each of so many blocks ends, in that order."""
        starts = [BLOCK_START * k / at_once for k in range(min(blocks, at_once))]
        ends: list[float] = []
        cycle = 0.0
        while len(ends) < blocks:
            for start in [s for s in starts if s <= cycle]:
                starts.remove(start)
                self.start_block(cycle)
            issued, later = False, min(starts, default=math.inf)
            for queue, free in zip(self.queues, self.free, strict=True):
                warp, until = self.choose(queue, free, cycle)
                if warp is None:
                    later = min(later, until)
                    continue
                issued = True
                self.issue(warp, free, cycle)
                queue.remove(warp)
                if warp.at < len(warp.trace):
                    queue.append(warp)  # the others come first
                    continue
                self.left[warp.block] -= 1
                if self.left[warp.block] == 0:
                    ends.append(cycle)
                    if len(self.left) + len(starts) < blocks:
                        starts.append(cycle + BLOCK_START)
            cycle = cycle + 1 if issued else max(cycle + 1, later)
        return ends

    def start_block(self, cycle: float) -> None:
        block = len(self.left)
        self.left.append(len(self.traces))
        for k, trace in enumerate(self.traces):
            self.queues[k % SCHEDULERS].append(Resident(trace, block, cycle))

    def choose(
        self, queue: list[Resident], free: dict[str, float], cycle: float
    ) -> tuple[Resident | None, float]:
        """The first warp that can go on; without one, when there may be one."""
        later = math.inf
        for warp in queue:
            until = warp.ready
            if until <= cycle:
                step = warp.trace[warp.at]
                for k in step.wait:
                    until = max(until, warp.boards[k])
                if until <= cycle:
                    until = self.taken_at(step.pipe, free)
                    if until <= cycle:
                        return warp, cycle
            later = min(later, until)
        return None, later

    def taken_at(self, pipe: str, free: dict[str, float]) -> float:
        if pipe == "fma":
            return min(free["fmaheavy"], free["light"])
        if pipe in ("shfl", "redux"):
            return self.shuffle
        if pipe == "lsu":
            return self.lsu - LSU_QUEUE
        return free.get(pipe, 0.0)

    def issue(self, warp: Resident, free: dict[str, float], cycle: float) -> None:
        step = warp.trace[warp.at]
        pipe, latency = step.pipe, step.latency
        if pipe == "fma":
            pipe = "light" if free["light"] <= free["fmaheavy"] else "fmaheavy"
        if pipe in free:
            free[pipe] = cycle + step.busy
        elif pipe in ("shfl", "redux"):
            self.shuffle = max(self.shuffle, cycle) + step.busy
        elif pipe == "lsu":
            self.lsu = max(self.lsu, cycle) + step.busy
            if step.moved:
                self.memory = max(self.memory, cycle) + step.moved / self.rate
            if step.loads:
                spread = 1 + JITTER * (2 * self.random.random() - 1)
                latency = self.memory - cycle + MEMORY_LATENCY * spread
        boards = warp.boards
        if step.write != NONE:
            boards[step.write] = max(boards[step.write], cycle + latency)
        if step.read != NONE:
            boards[step.read] = max(boards[step.read], cycle + READ_LATENCY)
        warp.ready = cycle + step.stall
        warp.at += 1


def share_of_copy(traces: list[list[Step]], moved: int, resident: int, machine: Machine) -> float:
    """Speed of blocks of such warps, `resident` warps at a time, that have to move `moved` bytes.

    1 is a copy's. Counted from the end of the first blocks to the end of the last ones that others
    follow.
    """
    at_once = resident // len(traces)
    waves = max(LEAST_WAVES, LEAST_STEPS // (at_once * sum(map(len, traces))))
    ends = Multiprocessor(traces, machine).ends(waves * at_once, at_once)
    first, last = at_once - 1, (waves - 1) * at_once - 1
    return (last - first) * moved / (ends[last] - ends[first]) / machine.rate


def waits_for_memory(trace: list[Step]) -> list[tuple[int, float]]:
    """Where a warp that is alone waits for memory: places in the trace, and cycles."""
    boards, cycle, waits = [0.0] * 6, 0.0, []
    for place, step in enumerate(trace):
        until = max([cycle, *(boards[k] for k in step.wait)])
        if until - cycle > MEMORY_LATENCY / 4:
            waits.append((place, until - cycle))
        latency = MEMORY_LATENCY if step.loads else step.latency
        if step.write != NONE:
            boards[step.write] = max(boards[step.write], until + latency)
        if step.read != NONE:
            boards[step.read] = max(boards[step.read], until + READ_LATENCY)
        cycle = until + step.stall
    return waits
