"""Reads compiled programs: what an instruction waits for."""

import math
import re

import numpy as np


def computations(hlo):
    """Returns each computation of a module: {instruction: (opcode, its operands)}.

    An instruction that calls a computation with a product counts as a product.
    """
    found = {}
    for head, block in re.findall(r"^(?:ENTRY )?%?([\w.-]+) [^\n]*\{\n(.*?)^\}", hlo, re.M | re.S):
        line = r"^\s*(?:ROOT )?%([\w.-]+) = .*? ([\w-]+)\((.*)$"
        found[head] = {
            name: (op, re.findall(r"%([\w.-]+)", rest))
            for name, op, rest in re.findall(line, block, re.M)
        }
    products = {head for head, ops in found.items() if any(op == "dot" for op, _ in ops.values())}
    for ops in found.values():
        for name, (op, operands) in ops.items():
            if op in ("call", "fusion") and products & set(operands):
                ops[name] = "dot", operands
    return found


def before(instructions, name):
    """Returns everything that an instruction waits for."""
    seen, open_ = set(), [name]
    while open_:
        for operand in instructions[open_.pop()][1]:
            if operand in instructions and operand not in seen:
                seen.add(operand)
                open_.append(operand)
    return seen


def entry_of(hlo):
    """Returns the instructions of the program itself."""
    return computations(hlo)[re.search(r"^ENTRY %?([\w.-]+)", hlo, re.MULTILINE)[1]]


def named(instructions, *opcodes):
    """Returns the names of all instructions of these kinds."""
    return {name for name, (op, _) in instructions.items() if op in opcodes}


def collectives(hlo, axes=None):
    """Returns (opcode, dtype, bytes) of each operand of each collective of a module.

    With `axes`, the sizes of the mesh's axes by name, also the names of those that it is over.
    """
    found = []
    opcodes = "all-reduce|all-gather|all-to-all|reduce-scatter"
    for types, op, rest in re.findall(rf"= (.*?) ({opcodes})(?:-start)?\((.*)$", hlo, re.MULTILINE):
        over = () if axes is None else (_axes_of(rest, axes),)
        for dtype, bits, dims in re.findall(r"\b(pred|[a-z]+?)(\d*)\[([\d,]*)\]", types):
            size = math.prod(int(d) for d in dims.split(",") if d)
            found.append((op, dtype + bits, size * int(bits or 8) // 8, *over))
    return found


def _axes_of(attributes, axes):
    """Returns the axes along which the devices of a group differ."""
    if of_mesh := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", attributes):
        order = re.findall(r"'(\w+)'=", of_mesh[1])
        return {list(axes)[order.index(n)] for n in re.findall(r"'(\w+)'", of_mesh[2])}
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes)
    numbers = [tuple(map(int, part.split(","))) if part else None for part in iota.groups()]
    shape, sizes, order = numbers
    devices = np.arange(math.prod(sizes)).reshape(sizes)
    group = devices.transpose(order or range(len(sizes))).reshape(shape)[0]
    places = np.unravel_index(group, tuple(axes.values()))
    return {name for name, place in zip(axes, places, strict=True) if len(set(place)) > 1}
