"""Reads compiled programs: what an instruction waits for."""

import math
import re


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


def collectives(hlo):
    """Returns (opcode, dtype, bytes) of each operand of each collective of a module."""
    found = []
    opcodes = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
    for types, op in re.findall(rf"= (.*?) ({opcodes})(?:-start)?\(", hlo):
        for dtype, bits, dims in re.findall(r"\b(pred|[a-z]+?)(\d*)\[([\d,]*)\]", types):
            size = math.prod(int(d) for d in dims.split(",") if d)
            found.append((op, dtype + bits, size * int(bits or 8) // 8))
    return found
