"""A digest of the program that is being lowered, by which ranks tell programs apart."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import re
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, Literal
from jax.interpreters import mlir
from jax.sharding import PartitionSpec

from cgx_jax import _compat


def label(ctx: mlir.LoweringRuleContext, name: str) -> str:
    """Returns what the ranks of a call compare before they send anything.

    It has the name of the module that is being lowered, a digest of its program, and `name`. The
    digest depends on every operation with its order, shapes, dtypes and static parameters, and on
    the paths of arguments and results. It leaves out what may differ between processes: callbacks
    and what only they use, objects without a value, and the values of closed-over arrays.
    """
    return f"{_compat.module_name(ctx)} {_digest(_compat.lowered_program())}, {name}"


_digests: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def _digest(program: Any) -> str:
    if program is None:
        return "unknown"
    if program not in _digests:  # a program may hold many calls
        names = _text((program.debug_info.arg_names, program.debug_info.result_paths), {})
        text = _program(program, {}) + names
        _digests[program] = hashlib.sha256(text.encode()).hexdigest()[:8]
    return _digests[program]


def _program(program: Any, seen: dict[int, str]) -> str:
    jaxpr = getattr(program, "jaxpr", program)  # a closed program's, too
    if id(jaxpr) not in seen:
        seen[id(jaxpr)] = hashlib.sha256("\n".join(_lines(jaxpr, seen)).encode()).hexdigest()
    return seen[id(jaxpr)]


def _lines(jaxpr: Any, seen: dict[int, str]) -> list[str]:
    numbers: dict[Any, int] = {}

    def made(variables: Any) -> str:
        for v in variables:
            numbers[v] = len(numbers)
        return " ".join(v.aval.str_short() for v in variables)

    def used(x: Any) -> str:
        return _text(x.val, seen) if isinstance(x, Literal) else str(numbers[x])

    lines = [made([*jaxpr.constvars, *jaxpr.invars])]
    for equation in _needed(jaxpr):
        operands = " ".join(map(used, equation.invars))
        name, results = equation.primitive.name, made(equation.outvars)
        params = "" if "callback" in name else _text(equation.params, seen)
        lines.append(f"{name} {operands} -> {results} {params}")
    return [*lines, " ".join(map(used, jaxpr.outvars))]


def _needed(jaxpr: Any) -> list[Any]:
    """Returns the equations that results depend on: one rank may print what others do not."""
    needed = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    kept = []
    for equation in reversed(jaxpr.eqns):
        if not needed.isdisjoint(equation.outvars):
            kept.append(equation)
            needed |= {v for v in equation.invars if not isinstance(v, Literal)}
    return kept[::-1]


def _text(value: Any, seen: dict[int, str]) -> str:
    """Returns text that is the same in every process, for values that are."""
    if isinstance(value, Jaxpr) or hasattr(value, "jaxpr"):
        return _program(value, seen)
    if isinstance(value, Mapping):
        return str(sorted((str(k), _text(v, seen)) for k, v in value.items()))
    if isinstance(value, tuple | list):
        return str([_text(v, seen) for v in value])
    if isinstance(value, set | frozenset):
        return str(sorted(_text(v, seen) for v in value))
    if isinstance(value, PartitionSpec):
        return "P" + _text((value.partitions, value.unreduced, value.reduced), seen)
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, bool | int | float | complex | str | bytes | np.generic | np.dtype | None):
        return re.sub("0x[0-9a-f]+", "", repr(value))
    if isinstance(value, type):
        return value.__name__
    kind = type(value).__name__
    if dataclasses.is_dataclass(value):
        fields = ((f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value))
        return kind + str([(name, _text(v, seen)) for name, v in fields])
    if np.ndim(value) == 0 and hasattr(value, "dtype") and hasattr(value, "item"):
        return f"{value.dtype} {value.item()}"
    return kind
