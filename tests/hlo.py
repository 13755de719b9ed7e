"""Reads compiled programs: what an instruction waits for, and what travels between devices."""

import math
import re
from typing import NamedTuple

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


class Sent(NamedTuple):
    """A result of a collective: its kind, dtype and bytes.

    Also the name of the computation that it is in, and the devices that are connected.
    """

    op: str
    dtype: str
    nbytes: int
    computation: str
    groups: np.ndarray

    def over(self, axes):
        """Returns the axes along which the devices of a group differ; `axes` are their sizes."""
        places = np.unravel_index(self.groups[0], tuple(axes.values()))
        return {name for name, place in zip(axes, places, strict=True) if len(set(place)) > 1}


def collectives(hlo):
    """Returns a `Sent` for each result of each collective of a module."""
    ops = "all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute|collective-broadcast"
    sent = []
    for head, block in re.findall(r"^(?:ENTRY )?%?([\w.-]+) [^\n]*\{\n(.*?)^\}", hlo, re.M | re.S):
        found = re.findall(rf"^[^=\n]* = (.*?) ({ops})(?:-start)?\((.*)$", block, re.M)
        for results, op, rest in found:
            for dtype, bits, dims in re.findall(r"\b(pred|[a-z]+?)(\d*)\[([\d,]*)\]", results):
                size = math.prod(int(d) for d in dims.split(",") if d) * int(bits or 8) // 8
                sent.append(Sent(op, dtype + bits, size, head, _groups(rest)))
    return sent


def _groups(attributes):
    """Returns the devices that an instruction connects, in each of the forms that XLA prints."""
    if found := re.search(r"replica_groups=mesh\[(.*?)\] ?\{(.*?)\}", attributes):
        sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", found[1])}
        over = [list(sizes).index(name) for name in re.findall(r"'(\w+)'", found[2])]
        devices = np.arange(math.prod(sizes.values())).reshape(list(sizes.values()))
        count = math.prod(devices.shape[i] for i in over)
        return np.moveaxis(devices, over, range(len(over))).reshape(count, -1).T
    iota = r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
    if found := re.search(iota, attributes):
        shape, dims, order = (
            [int(n) for n in part.split(",")] if part else None for part in found.groups()
        )
        devices = np.arange(math.prod(dims)).reshape(dims)
        return (devices if order is None else devices.transpose(order)).reshape(shape)
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})?\}", attributes)[1]
    groups = re.findall(r"\{([\d,]+)\}", listed or "")
    return np.array([[int(n) for n in group.split(",")] for group in groups])
