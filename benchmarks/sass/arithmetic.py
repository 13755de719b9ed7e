"""The arithmetic of sm_90: opcodes on integers, predicates and floats.

Each function takes a warp (warp.py), an instruction and the mask of the lanes that execute it.
MUFU is exact here where a GPU's is an approximation: the compiler's division and square root
correct either to the same result.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from machine_code import Instruction, Operand

if TYPE_CHECKING:
    from warp import Warp

Array = np.ndarray
LOW_WORD = np.uint64(0xFFFFFFFF)
NAN = np.uint32(0x7FFFFFFF).view(np.float32)  # what arithmetic makes
SMALLEST = np.float32(2.0**-126)


def require(known: bool, i: Instruction) -> None:
    """Raises where an opcode has a form that no kernel has used."""
    if not known:
        raise NotImplementedError(f"a new form of an opcode: {i}")


def low_word(x: Array) -> Array:
    return (x & LOW_WORD).astype(np.uint32)


def wide(high: Array, low: Array) -> Array:
    return high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64)


def carry_of(total: Array) -> Array:
    return total >> np.uint64(32)


def signed(x: Array, i: Instruction) -> Array:
    return x if "U32" in i.suffixes else x.view(np.int32)


def truth_table(table: int, inputs: list[Array]) -> Array:
    """The function of three operands, words or predicates, that LOP3's number says."""
    a, b, c = inputs
    result = a ^ a
    for row in range(8):
        if table >> row & 1:
            result = result | (
                (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
            )
    return result


def compare(how: str, a: Array, b: Array) -> Array:
    operation: dict[str, Callable[[Any, Any], Any]] = {
        "EQ": np.equal,
        "NE": np.not_equal,
        "LT": np.less,
        "LE": np.less_equal,
        "GT": np.greater,
        "GE": np.greater_equal,
    }
    return operation[how](a, b)


def combined(w: "Warp", i: Instruction, result: Array) -> Array:
    """A comparison's result with the predicate that it is to be joined with."""
    also = w.predicate(i.operands[4])
    return result | also if "OR" in i.suffixes else result & also


def leading_predicates(operands: tuple[Operand, ...]) -> tuple[list[Operand], list[Operand]]:
    rest = list(operands)
    predicates = []
    while rest[0].predicate:
        predicates.append(rest.pop(0))
    return predicates, rest


# Integers.


def addend(w: "Warp", o: Operand) -> Array:
    """An operand of a sum with a carry: -x is ~x and 1 more, as the hardware adds it."""
    if o.negative and o.kind != "number":
        return (~w.bits(o)).astype(np.uint64) + np.uint64(1)
    return w.word(o).astype(np.uint64)


def add3(w: "Warp", i: Instruction, mask: Array) -> None:
    carries, (a, b, c, *more) = leading_predicates(i.operands[1:])
    total = addend(w, a) + addend(w, b) + addend(w, c)
    if "X" in i.suffixes:
        for predicate in more:
            total = total + w.predicate(predicate).astype(np.uint64)
    w.write(i.operands[0], low_word(total), mask)
    for k, predicate in enumerate(carries):
        w.write(predicate, carry_of(total) > k, mask)


def add(w: "Warp", i: Instruction, mask: Array) -> None:
    to, a, b = i.operands
    w.write(to, w.word(a) + w.word(b), mask)


def multiply_add(w: "Warp", i: Instruction, mask: Array) -> None:
    to, a, b, c, *carry = i.operands
    require("HI" not in i.suffixes and not a.predicate, i)
    if "WIDE" not in i.suffixes:
        result = w.word(a) * w.word(b) + w.word(c)
        if "X" in i.suffixes:
            result = result + w.predicate(carry[0]).astype(np.uint32)
        w.write(to, result, mask)
        return
    x, y = (signed(w.word(o), i).astype(np.int64).view(np.uint64) for o in (a, b))
    total = x * y + w.pair(c)
    w.write(to, low_word(total), mask)
    w.write(to, carry_of(total).astype(np.uint32), mask, 1)


def shifted_add(w: "Warp", i: Instruction, mask: Array) -> None:
    carries, rest = leading_predicates(i.operands[1:])
    if "HI" in i.suffixes:  # add + ((high:low) >> (32 - shift))
        low, added = w.word(rest[0]), w.word(rest[1])
        if "SX32" in i.suffixes:
            high, tail = (low.view(np.int32) >> 31).view(np.uint32), rest[2:]
        else:
            high, tail = w.word(rest[2]), rest[3:]
        part = wide(high, low) >> np.uint64(32 - tail[0].number) & LOW_WORD
        total = part + added.astype(np.uint64)
        if "X" in i.suffixes:
            total = total + w.predicate(tail[1]).astype(np.uint64)
    else:
        value, added, shift = rest[:3]
        part = w.word(value).astype(np.uint64) << np.uint64(shift.number) & LOW_WORD
        total = part + w.word(added).astype(np.uint64)
    w.write(i.operands[0], low_word(total), mask)
    for predicate in carries:
        w.write(predicate, carry_of(total) > 0, mask)


def shift(w: "Warp", i: Instruction, mask: Array) -> None:
    to, *parts = i.operands
    low, by, high = (w.word(o) for o in parts)
    most = np.uint64(63 if "U64" in i.suffixes or "S64" in i.suffixes else 32)
    by = np.minimum(by.astype(np.uint64), most)
    if i.suffixes[0] == "L":
        result = wide(high, low) << by
        if "HI" in i.suffixes:
            result = carry_of(result)
    elif "HI" not in i.suffixes:
        require("U64" in i.suffixes, i)
        result = wide(high, low) >> by
    elif "S32" in i.suffixes:
        result = (high.view(np.int32).astype(np.int64) >> by.astype(np.int64)).view(np.uint64)
    else:
        result = high.astype(np.uint64) >> by
    w.write(to, low_word(result), mask)


def logic3(w: "Warp", i: Instruction, mask: Array) -> None:
    nonzero, (to, *inputs, table, unused) = leading_predicates(i.operands)
    require(unused.index < 0 and unused.inverted, i)
    result = truth_table(table.number, [w.word(o) for o in inputs])
    w.write(to, result, mask)
    for predicate in nonzero:
        w.write(predicate, result != 0, mask)


def logic3_of_predicates(w: "Warp", i: Instruction, mask: Array) -> None:
    to, _, *inputs, table, _ = i.operands
    w.write(to, truth_table(table.number, [w.predicate(o) for o in inputs]), mask)


def compare_integers(w: "Warp", i: Instruction, mask: Array) -> None:
    how = i.suffixes[0]
    a, b = (signed(w.word(o), i) for o in i.operands[2:4])
    if "EX" in i.suffixes:  # the upper words: where they are equal the lower ones have decided
        result = (a == b) & w.predicate(i.operands[5])
        if how != "EQ":
            result = result | compare({"LE": "LT", "GE": "GT"}.get(how, how), a, b)
    else:
        result = compare(how, a, b)
    w.write(i.operands[0], combined(w, i, result), mask)


def minimum_maximum(w: "Warp", i: Instruction, mask: Array) -> None:
    to, *inputs, least = i.operands
    values = np.broadcast_arrays(*(signed(w.word(o), i) for o in inputs))
    smallest, largest = np.minimum.reduce(values), np.maximum.reduce(values)
    w.write(to, np.where(w.predicate(least), smallest, largest).view(np.uint32), mask)


# Floats.


def flushed(x: Array, i: Instruction) -> Array:
    """With the suffix FTZ subnormal numbers are zeros."""
    tiny = ("FTZ" in i.suffixes) & (np.abs(x) < SMALLEST)
    return np.where(tiny, np.copysign(np.float32(0), x), x)


def rounded(exact: Array, i: Instruction) -> Array:
    """A long double as float32, to nearest or as an opcode's RP, RM or RZ says."""
    result = exact.astype(np.float32)
    mode = next((s for s in i.suffixes if s in ("RP", "RM", "RZ")), None)
    if mode:
        above, below = result.astype(np.longdouble) > exact, result.astype(np.longdouble) < exact
        down = np.where(above, np.nextafter(result, np.float32(-np.inf)), result)
        up = np.where(below, np.nextafter(result, np.float32(np.inf)), result)
        result = {"RP": up, "RM": down, "RZ": np.where(exact > 0, down, up)}[mode]
    return result


def write_real(w: "Warp", o: Operand, value: Array, mask: Array) -> None:
    value = np.where(np.isnan(value), NAN, value)
    w.write(o, np.ascontiguousarray(value).view(np.uint32), mask)


def add_real(w: "Warp", i: Instruction, mask: Array) -> None:
    to, *inputs = i.operands
    a, b = (flushed(w.real(o), i).astype(np.longdouble) for o in inputs)
    write_real(w, to, flushed(rounded(a + b, i), i), mask)


def multiply_real(w: "Warp", i: Instruction, mask: Array) -> None:
    to, *inputs = i.operands
    a, b = (flushed(w.real(o), i) for o in inputs)
    write_real(w, to, flushed(a * b, i), mask)


def multiply_add_real(w: "Warp", i: Instruction, mask: Array) -> None:
    to, *inputs = i.operands
    a, b, c = (w.real(o).astype(np.longdouble) for o in inputs)
    write_real(w, to, rounded(a * b + c, i), mask)


def compare_reals(w: "Warp", i: Instruction, mask: Array) -> None:
    how = i.suffixes[0]
    a, b = (flushed(w.real(o), i) for o in i.operands[2:4])
    unordered = np.isnan(a) | np.isnan(b)
    if how in ("NAN", "NUM"):
        result = unordered == (how == "NAN")
    elif how.endswith("U"):
        result = compare(how[:-1], a, b) | unordered
    else:
        result = compare(how, a, b) & ~unordered
    w.write(i.operands[0], combined(w, i, result), mask)


def minimum_maximum_real(w: "Warp", i: Instruction, mask: Array) -> None:
    to, first, second, least = i.operands
    a, b = np.broadcast_arrays(w.real(first), w.real(second))
    # Of zeros the negative one is the smaller one.
    first_is_less = (a < b) | ((a == b) & np.signbit(a)) | np.isnan(b)
    first_is_more = (a > b) | ((a == b) & np.signbit(b)) | np.isnan(b)
    result = np.where(np.where(w.predicate(least), first_is_less, first_is_more), a, b)
    if "NAN" in i.suffixes:
        result = np.where(np.isnan(a) | np.isnan(b), NAN, result)
    write_real(w, to, result, mask)


def check_division(w: "Warp", i: Instruction, mask: Array) -> None:
    """Whether a division needs its slow path."""
    to, *inputs = i.operands
    a, b = (w.bits(o) for o in inputs)
    above, below = ((x >> np.uint32(23) & np.uint32(255)).astype(np.int32) for x in (a, b))
    tiny = (above <= 24) & ((a & np.uint32(0x7FFFFFFF)) != 0)
    far = np.abs(above - below) >= 126
    w.write(to, (below >= 253) | (below <= 1) | (above == 255) | far | tiny, mask)


def approximate(w: "Warp", i: Instruction, mask: Array) -> None:
    to, x = i.operands[0], w.real(i.operands[1]).astype(np.float64)
    result = {"RCP": lambda: 1 / x, "RSQ": lambda: 1 / np.sqrt(x)}[i.suffixes[0]]()
    write_real(w, to, result.astype(np.float32), mask)


def real_of_integer(w: "Warp", i: Instruction, mask: Array) -> None:
    require(i.suffixes == ("F32", "S32"), i)
    to, x = i.operands
    w.write(to, w.word(x).view(np.int32).astype(np.float32).view(np.uint32), mask)


def pack_halves(w: "Warp", i: Instruction, mask: Array) -> None:
    require("PACK_AB" in i.suffixes, i)

    def half(x: Array) -> Array:
        if "BF16" in i.suffixes:
            word = x.view(np.uint32)
            narrow = word + np.uint32(0x7FFF) + (word >> np.uint32(16) & np.uint32(1))
            narrow = narrow >> np.uint32(16)
        else:
            narrow = x.astype(np.float16).view(np.uint16).astype(np.uint32)
        return np.where(np.isnan(x), np.uint32(0x7FFF), narrow)

    to, high, low = i.operands
    w.write(to, half(w.real(high)) << np.uint32(16) | half(w.real(low)), mask)


def widen_half(w: "Warp", i: Instruction, mask: Array) -> None:
    to, zero, x = i.operands
    require(i.suffixes == ("F32",) and zero.index < 0 and not x.negative, i)
    half = (w.bits(x) >> np.uint32(16 * x.half)).astype(np.uint16).view(np.float16)
    write_real(w, to, half.astype(np.float32), mask)
