"""One warp of sm_90 machine code in NumPy: its bytes, and what each instruction touches.

32 lanes with program counters of their own, BSSY/BSYNC reconvergence, and global memory in arrays.
What opcodes do is in opcodes.py.
"""

import dataclasses
from typing import NamedTuple

import numpy as np
import opcodes
from machine_code import Code, Instruction, Operand

LANES = 32
# Where a launch's numbers lie in its constant bank, by the calling convention of sm_90.
BLOCK_AT, GRID_AT, PARAMETERS_AT = 0x0, 0xC, 0x210
REGION_BITS = 32
SECTOR = 32  # bytes that memory moves at once
LIMIT = 1_000_000  # instructions


class Issued(NamedTuple):
    """An instruction that the warp has issued; `sectors` of a load or a store that touched any."""

    instruction: Instruction
    sectors: int = 0
    near: bool = False  # what it read is what every warp reads, so no memory was asked for it


@dataclasses.dataclass
class Region:
    address: int
    data: np.ndarray  # uint8
    near: bool


class Memory:
    """Global memory: arrays far apart. An access outside of them raises, and a misaligned one."""

    def __init__(self) -> None:
        self.regions: list[Region] = []

    def add(self, array: np.ndarray, shift: int = 0, near: bool = False) -> Region:
        """Copies an array in, `shift` bytes after a multiple of 2^32."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy()
        region = Region((len(self.regions) + 1 << REGION_BITS) + shift, data, near)
        self.regions.append(region)
        return region

    def places(self, addresses: np.ndarray, width: int) -> tuple[Region, np.ndarray]:
        """The region that all of the addresses lie in, and the places [lane, width] in its data."""
        number = int(addresses[0]) >> REGION_BITS
        if not 1 <= number <= len(self.regions):
            raise MemoryError(f"{int(addresses[0]):#x} is in no array")
        region = self.regions[number - 1]
        first = addresses.astype(np.int64) - region.address
        if (first < 0).any() or (first + width > len(region.data)).any():
            raise MemoryError(f"array {number} of {len(region.data)} bytes, places {first}")
        if (addresses % np.uint64(width)).any():
            raise MemoryError(f"array {number}: {width} bytes at odd addresses {first}")
        return region, first[:, None] + np.arange(width)


def constant_bank(block: int, grid: int, parameters: bytes) -> np.ndarray:
    bank = np.zeros(PARAMETERS_AT + len(parameters), np.uint8)
    for at, size in ((BLOCK_AT, block), (GRID_AT, grid)):
        bank[at : at + 12] = np.array([size, 1, 1], np.uint32).view(np.uint8)
    bank[PARAMETERS_AT:] = np.frombuffer(parameters, np.uint8)
    return bank


class Warp:
    """Runs to the end when it is made; `trace` is what it has issued."""

    def __init__(
        self, code: Code, bank: np.ndarray, memory: Memory, block: int, first_thread: int
    ) -> None:
        self.code, self.bank, self.memory, self.block = code, bank, memory, block
        self.thread = np.arange(LANES, dtype=np.uint32) + np.uint32(first_thread)
        # The last of each kind is the register that is zero and the predicate that is true; what
        # is uniform has one lane.
        self.files = {
            "R": np.zeros((256, LANES), np.uint32),
            "UR": np.zeros((64, 1), np.uint32),
            "P": np.zeros((8, LANES), bool),
            "UP": np.zeros((8, 1), bool),
        }
        self.files["P"][-1] = self.files["UP"][-1] = True
        self.pc = np.zeros(LANES, np.int64)
        self.done = np.zeros(LANES, bool)
        self.parked = np.full(LANES, -1)  # the BSYNC where a lane waits for others
        self.group = np.zeros((LANES, LANES), bool)  # for whom it waits there
        self.barriers = np.zeros((16, LANES, LANES), bool)  # the same of each BSSY
        self.trace: list[Issued] = []
        with np.errstate(all="ignore"):
            while not self.done.all():
                self.step()

    # Operands: arrays of 32 lanes, or of one where all lanes see the same.

    def bits(self, o: Operand) -> np.ndarray:
        """The word of an operand without its signs."""
        if o.kind == "number":
            return np.array([o.number], np.uint32)
        if o.kind == "constant":
            return self.constant(o, 4)[0]
        return self.files[o.kind][o.index]

    def word(self, o: Operand) -> np.ndarray:
        word = self.bits(o)
        if o.negative and o.kind != "number":
            word = np.uint32(0) - word
        return ~word if o.inverted else word

    def real(self, o: Operand) -> np.ndarray:
        word = self.bits(o)
        if o.magnitude:
            word = word & np.uint32(0x7FFFFFFF)
        if o.negative and o.kind != "number":
            word = word ^ np.uint32(0x80000000)
        return word.view(np.float32)

    def pair(self, o: Operand) -> np.ndarray:
        """The 64-bit number of a register and the next one."""
        if o.index < 0:
            return np.zeros(1, np.uint64)
        low, high = self.files[o.kind][o.index : o.index + 2].astype(np.uint64)
        return high << np.uint64(32) | low

    def predicate(self, o: Operand) -> np.ndarray:
        value = self.files[o.kind][o.index]
        return ~value if o.inverted else value

    def constant(self, o: Operand, width: int) -> np.ndarray:
        """Words [width / 4, lanes] of the constant bank; zero outside of it, as on a GPU."""
        base = self.bits(o.base).view(np.int32).astype(np.int64) if o.base else np.zeros(1, int)
        at = (base + o.number)[:, None] + np.arange(width)
        inside = (at >= 0) & (at < len(self.bank))
        data = np.where(inside, self.bank[np.clip(at, 0, len(self.bank) - 1)], np.uint8(0))
        data = np.pad(data, ((0, 0), (0, -width % 4)))
        return np.ascontiguousarray(data).view(np.uint32).T

    def addresses(self, o: Operand) -> np.ndarray:
        base = self.pair(o.base) if o.base else np.zeros(1, np.uint64)
        return np.broadcast_to(base + np.uint64(o.number & (1 << 64) - 1), LANES)

    def write(self, o: Operand, value: np.ndarray, mask: np.ndarray, offset: int = 0) -> None:
        """Sets a register or predicate, `offset` after the operand's, in the lanes of a mask."""
        if o.index < 0:
            return
        file = self.files[o.kind][o.index + offset]
        if len(file) == LANES:
            np.copyto(file, value, where=mask)
        else:
            file[0] = np.broadcast_to(value, LANES)[np.argmax(mask)]

    # Control flow: of the lanes that can go on, those at the lowest address do.

    def step(self) -> None:
        ready = ~self.done & (self.parked < 0)
        if not ready.any() or len(self.trace) == LIMIT:
            raise RuntimeError(f"stuck after {len(self.trace)} instructions, parked {self.parked}")
        pc = int(self.pc[ready].min())
        active = ready & (self.pc == pc)
        instruction = self.code[pc]
        mask = active & self.predicate(instruction.guard) if instruction.guard else active
        self.trace.append(Issued(instruction))
        self.pc[active] = pc + 16
        if mask.any():
            execute = opcodes.OPCODES.get(instruction.name)
            if execute:
                execute(self, instruction, mask)
            else:
                self.control(instruction, mask)

    def control(self, i: Instruction, mask: np.ndarray) -> None:
        if i.name == "BRA":
            *condition, target = i.operands
            for predicate in condition:
                mask = mask & self.predicate(predicate)
            self.pc[mask] = target.number
        elif i.name == "CALL":
            self.pc[mask] = i.operands[0].number
        elif i.name == "RET":
            register, offset = i.operands[0].text.split()
            at = self.files["R"][int(register[1:])].astype(np.int64) + int(offset, 16)
            self.pc[mask] = at[mask]
        elif i.name == "EXIT":
            self.done |= mask
            self.release()
        elif i.name == "BSSY":
            self.barriers[int(i.operands[0].text[1:]), mask] = mask
        elif i.name == "BSYNC":
            self.parked[mask] = i.address
            self.group[mask] = self.barriers[int(i.operands[0].text[1:]), mask]
            self.release()
        elif i.name != "NOP":
            raise NotImplementedError(i.name)

    def release(self) -> None:
        """Lets go the lanes whose whole group has come to where they wait."""
        for lane in np.flatnonzero(self.parked >= 0):
            at, group = self.parked[lane], self.group[lane]
            if at >= 0 and (self.done | (self.parked == at))[group].all():
                self.parked[group] = -1

    # Memory.

    def touch(
        self, o: Operand, width: int, mask: np.ndarray, load: bool
    ) -> tuple[Region, np.ndarray]:
        """Where an access of the lanes of a mask goes; notes in the trace what it touches."""
        addresses = self.addresses(o)[mask]
        region, places = self.memory.places(addresses, width)
        sectors = len(np.unique(addresses // np.uint64(SECTOR)))
        self.trace[-1] = self.trace[-1]._replace(sectors=sectors, near=region.near and load)
        return region, places
