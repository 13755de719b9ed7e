"""Reads compiled programs: what an instruction waits for, and what travels between devices."""

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


def collectives(hlo):
    """Yields (computation, opcode, {dtype: values}, groups of devices) of every collective."""
    ops = "all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute|collective-broadcast"
    for head, block in re.findall(r"^(?:ENTRY )?%?([\w.-]+) [^\n]*\{\n(.*?)^\}", hlo, re.M | re.S):
        found = re.findall(rf"^[^=\n]* = (.*?) ({ops})(?:-start)?\((.*)$", block, re.M)
        for results, op, rest in found:
            sizes = {}
            for dtype, shape in re.findall(r"(\w+)\[([\d,]*)\]", results):
                count = np.prod([int(n) for n in shape.split(",") if n], dtype=int)
                sizes[dtype] = sizes.get(dtype, 0) + int(count)
            yield head, op, sizes, _groups(rest)


def _groups(attributes):
    """Returns the devices that an instruction connects, in each of the forms that XLA prints."""
    if found := re.search(r"replica_groups=mesh\[(.*?)\] ?\{(.*?)\}", attributes):
        sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", found[1])}
        over = [list(sizes).index(name) for name in re.findall(r"'(\w+)'", found[2])]
        devices = np.arange(np.prod(list(sizes.values()))).reshape(list(sizes.values()))
        return (
            np.moveaxis(devices, over, range(len(over)))
            .reshape(-1, devices.size // np.prod([devices.shape[i] for i in over]))
            .T
        )
    if found := re.search(
        r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", attributes
    ):
        shape, dims, order = (
            [int(n) for n in part.split(",")] if part else None for part in found.groups()
        )
        devices = np.arange(np.prod(dims)).reshape(dims)
        return (devices if order is None else devices.transpose(order)).reshape(shape)
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}", attributes)[1]
    return [[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", listed)]
