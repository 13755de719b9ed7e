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
    """Returns (opcode, dtypes, bytes of its results) of every collective of a program."""
    kinds = "all-gather|all-to-all|all-reduce|reduce-scatter|collective-permute"
    found = []
    for types, op in re.findall(rf"^\s*(?:ROOT )?%\S+ = (.*?) ({kinds})(?:-start)?\(", hlo, re.M):
        results = re.findall(r"([a-z]+)(\d*)\w*\[([\d,]*)\]", types)
        sizes = [math.prod(int(n) for n in shape.split(",") if n) for _, _, shape in results]
        size = sum(n * int(bits or 8) // 8 for n, (_, bits, _) in zip(sizes, results, strict=True))
        found.append((op, {kind + bits for kind, bits, _ in results}, size))
    return found
