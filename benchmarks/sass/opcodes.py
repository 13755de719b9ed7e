"""What the opcodes of sm_90 do to a warp: those that the kernels use, in the forms they use.

Each function takes a warp (warp.py), an instruction and the mask of the lanes that execute it.
"""

from typing import TYPE_CHECKING

import arithmetic
import numpy as np
from arithmetic import Array, low_word, require, wide
from machine_code import Instruction

if TYPE_CHECKING:
    from warp import Warp


# Moves.


def s2r(w: "Warp", i: Instruction, mask: Array) -> None:
    values = {"SR_TID.X": w.thread, "SR_CTAID.X": np.array([w.block], np.uint32)}
    w.write(i.operands[0], values[i.operands[1].text], mask)


def cs2r(w: "Warp", i: Instruction, mask: Array) -> None:
    require(i.operands[1].text == "SRZ", i)
    for k in range(1 if "32" in i.suffixes else 2):
        w.write(i.operands[0], np.zeros(1, np.uint32), mask, k)


def load_constant(w: "Warp", i: Instruction, mask: Array) -> None:
    for k, words in enumerate(w.constant(i.operands[1], i.width)):
        w.write(i.operands[0], words, mask, k)


def move(w: "Warp", i: Instruction, mask: Array) -> None:
    w.write(i.operands[0], w.word(i.operands[1]), mask)


def hfma2(w: "Warp", i: Instruction, mask: Array) -> None:
    # Only as it loads a constant, the two halves of a word.
    require((i.operands[1].index, i.operands[2].index) == (-1, -1), i)
    high, low = (np.float16(o.text).view(np.uint16) for o in i.operands[3:5])
    w.write(i.operands[0], np.array([int(high) << 16 | int(low)], np.uint32), mask)


def p2r(w: "Warp", i: Instruction, mask: Array) -> None:
    to, what, old, which = i.operands
    file = w.files["UP" if what.text == "UPR" else "P"]
    value = np.zeros(file.shape[1], np.uint32)
    for k in range(7):
        value |= file[k].astype(np.uint32) << np.uint32(k)
    kept = np.uint32(which.number)
    w.write(to, w.word(old) & ~kept | value & kept, mask)


def permute(w: "Warp", i: Instruction, mask: Array) -> None:
    to, low, selector, high = i.operands
    source, select = wide(w.word(high), w.word(low)), w.word(selector)
    result = np.zeros(1, np.uint32)
    for k in range(4):
        which = select >> np.uint32(4 * k) & np.uint32(15)
        at = np.uint64(8) * (which & np.uint32(7)).astype(np.uint64)
        byte = low_word(source >> at & np.uint64(255))
        signs = byte // np.uint32(128) * np.uint32(255)
        byte = np.where(which < 8, byte, signs)  # from 8 on: copies of the byte's sign
        result = result | byte << np.uint32(8 * k)
    w.write(to, result, mask)


def select(w: "Warp", i: Instruction, mask: Array) -> None:
    to, a, b, which = i.operands
    w.write(to, np.where(w.predicate(which), w.word(a), w.word(b)), mask)


def select_real(w: "Warp", i: Instruction, mask: Array) -> None:
    to, a, b, which = i.operands
    w.write(to, np.where(w.predicate(which), w.real(a), w.real(b)).view(np.uint32), mask)


# Across lanes.


def shuffle(w: "Warp", i: Instruction, mask: Array) -> None:
    _, to, value, lane, _ = i.operands
    values = np.broadcast_to(w.word(value), len(mask))
    lanes = np.arange(len(mask))
    by = w.word(lane).astype(np.int64)
    source = np.broadcast_to(lanes ^ by if i.suffixes[0] == "BFLY" else by, len(mask))
    require(bool(mask[source[mask]].all()), i)  # from a lane that takes no part: any value
    w.write(to, values[source], mask)


def vote(w: "Warp", i: Instruction, mask: Array) -> None:
    require(i.suffixes == ("ANY",), i)
    to, value = i.operands
    w.write(to, (np.broadcast_to(w.predicate(value), len(mask)) & mask).any(keepdims=True), mask)


def reduce_lanes(w: "Warp", i: Instruction, mask: Array) -> None:
    to, value = i.operands
    word = np.broadcast_to(w.word(value), len(mask))[mask]
    word = word.view(np.int32) if "S32" in i.suffixes else word
    result = word.min(keepdims=True) if i.suffixes[0] == "MIN" else word.max(keepdims=True)
    w.write(to, result.view(np.uint32), mask)


# Memory.


def load(w: "Warp", i: Instruction, mask: Array) -> None:
    to, at = i.operands
    region, places = w.touch(at, i.width, mask, load=True)
    data = np.pad(region.data[places], ((0, 0), (0, -i.width % 4)))
    for k, words in enumerate(np.ascontiguousarray(data).view(np.uint32).T):
        value = np.zeros(len(mask), np.uint32)
        value[mask] = words
        w.write(to, value, mask, k)


def store(w: "Warp", i: Instruction, mask: Array) -> None:
    at, value = i.operands
    region, places = w.touch(at, i.width, mask, load=False)
    words = max(1, i.width // 4)
    data = np.zeros((len(mask), words), np.uint32)
    if value.index >= 0:
        data[:] = w.files[value.kind][value.index : value.index + words].T
    region.data[places] = data.view(np.uint8)[mask, : i.width]


OPCODES = {
    **dict.fromkeys(("S2R", "S2UR"), s2r),
    "CS2R": cs2r,
    **dict.fromkeys(("LDC", "ULDC"), load_constant),
    **dict.fromkeys(("MOV", "UMOV", "R2UR"), move),
    "HFMA2": hfma2,
    **dict.fromkeys(("P2R", "UP2UR"), p2r),
    "PRMT": permute,
    **dict.fromkeys(("SEL", "USEL"), select),
    "FSEL": select_real,
    **dict.fromkeys(("IADD3", "UIADD3"), arithmetic.add3),
    "VIADD": arithmetic.add,
    **dict.fromkeys(("IMAD", "UIMAD"), arithmetic.multiply_add),
    **dict.fromkeys(("LEA", "ULEA"), arithmetic.shifted_add),
    **dict.fromkeys(("SHF", "USHF"), arithmetic.shift),
    **dict.fromkeys(("LOP3", "ULOP3"), arithmetic.logic3),
    "PLOP3": arithmetic.logic3_of_predicates,
    **dict.fromkeys(("ISETP", "UISETP"), arithmetic.compare_integers),
    **dict.fromkeys(("VIMNMX", "VIMNMX3"), arithmetic.minimum_maximum),
    "FADD": arithmetic.add_real,
    "FMUL": arithmetic.multiply_real,
    "FFMA": arithmetic.multiply_add_real,
    "FSETP": arithmetic.compare_reals,
    "FMNMX": arithmetic.minimum_maximum_real,
    "FCHK": arithmetic.check_division,
    "MUFU": arithmetic.approximate,
    "I2FP": arithmetic.real_of_integer,
    "F2FP": arithmetic.pack_halves,
    "HADD2": arithmetic.widen_half,
    "SHFL": shuffle,
    "VOTEU": vote,
    "REDUX": reduce_lanes,
    "LDG": load,
    "STG": store,
}
