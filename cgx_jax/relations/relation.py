"""How the values of plain jit's program follow from the values of the ranks' programs."""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from cgx_jax import _compat


class Kind(enum.Enum):
    """What plain jit's value is, given the ranks' values, up to a power of the world size."""

    ZERO = "zero everywhere"
    SAME = "the same on every rank"
    ROWS = "the ranks' values, one after the other"
    SUM = "the sum of the ranks' values"
    DRAWS = "a PRNG key, of which each rank has its own"
    POSITION = "the number of each example"
    INDEX = "indices, one row per example, of which some columns are POSITION"
    RANK = "0 in plain jit, and on a rank its own number times `columns`"
    EACH = "the value of one example, in a loop over examples"
    CARRY = "the sum so far, in a loop over examples"
    UNKNOWN = "not known"


@dataclasses.dataclass(frozen=True)
class Relation:
    """plain jit's value = world**power * (what `kind` says of the ranks' values).

    ROWS are concatenated along the dimension that is longer in plain jit's program. `columns` are
    those of an INDEX, the number of a CARRY, or the factor of a RANK. `why` says why it is UNKNOWN,
    and `line` where in the user's program (`where`).
    """

    kind: Kind
    power: int = 0
    columns: tuple[int, ...] = ()
    why: str = ""
    line: str = ""

    @property
    def sure(self) -> bool:
        """Whether plain jit and every rank have the same value."""
        return self.kind is Kind.ZERO or self == SAME

    def as_sum(self) -> Relation:
        """Returns SAME as SUM, since world equal values add up to world times as much."""
        return Relation(Kind.SUM, self.power - 1) if self.kind is Kind.SAME else self

    def at(self, power: int) -> Relation:
        """Returns the relation with another power of the world size."""
        return dataclasses.replace(self, power=power)

    def of(self, kind: Kind) -> Relation:
        """Returns the relation of another kind with the same power; zeros stay zeros."""
        return self if self.kind is Kind.ZERO else Relation(kind, self.power)


ZERO, SAME, ROWS, DRAWS = map(Relation, (Kind.ZERO, Kind.SAME, Kind.ROWS, Kind.DRAWS))
SUM, MEAN = Relation(Kind.SUM), Relation(Kind.SUM, -1)
NUMBERS = frozenset({Kind.ZERO, Kind.SAME, Kind.ROWS, Kind.SUM})


def unknown(why: str, line: str = "") -> Relation:
    """Returns the relation of a value from which plain jit's value does not follow."""
    return Relation(Kind.UNKNOWN, why=why, line=line)


def join(relations: Iterable[Relation]) -> Relation | None:
    """Returns a relation that holds for a value that has any of these; None if there is none."""
    first, *rest = relations
    found: Relation | None = first
    for r in rest:
        found = found and _either(found, r)
    return found


def _either(a: Relation, b: Relation) -> Relation | None:
    for one, other in ((a, b), (b, a)):
        if one == other or other.kind is Kind.UNKNOWN:
            return other
        if one.kind is Kind.ZERO and (other.kind in NUMBERS or other.kind is Kind.EACH):
            return other
        if other.kind is Kind.SAME and one in (other.as_sum(), other.of(Kind.EACH)):
            return one
    return None


def growing(small: Sequence[int], large: Sequence[int], world: int) -> int | None:
    """Returns the dimension that is `world` times as long in `large`; -1 if none is longer.

    Returns None for shapes that differ in another way, or in several dimensions.
    """
    if len(small) != len(large):
        return None
    found = [d for d, (a, b) in enumerate(zip(small, large, strict=True)) if a != b]
    if not found:
        return -1
    d = found[0]
    return d if len(found) == 1 and large[d] == world * small[d] else None


@dataclasses.dataclass(frozen=True)
class Pair:
    """One equation in both programs, and the relations of its operands."""

    world: int
    axes: tuple[Any, ...]
    small: Any
    large: Any
    given: tuple[Relation, ...]

    @property
    def name(self) -> str:
        """The primitive."""
        return str(self.small.primitive.name)

    @property
    def count(self) -> int:
        """The number of results."""
        return len(self.small.outvars)

    @property
    def over(self) -> tuple[Any, ...]:
        """The named axes of a collective."""
        axes = self.small.params.get("axes", self.small.params.get("axis_name", ()))
        return tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)

    def names_ranks(self) -> bool:
        """Whether a parameter names one of the axes over which the batch is split."""
        params = repr([v for k, v in self.small.params.items() if k not in _PLACE])
        return any(repr(axis) in params for axis in self.axes)

    def shape(self, i: int) -> tuple[int, ...]:
        """Returns the shape of operand `i` on a rank; of result -i - 1 for negative numbers."""
        x = self.small.invars[i] if i >= 0 else self.small.outvars[-i - 1]
        return tuple(x.aval.shape)

    def grown(self, i: int = -1) -> int | None:
        """Returns what `growing` does for operand `i`, or for result -i - 1."""
        x = self.large.invars[i] if i >= 0 else self.large.outvars[-i - 1]
        return growing(self.shape(i), x.aval.shape, self.world)

    def param(self, name: str) -> Any:
        """Returns a parameter of the rank's program."""
        return self.small.params.get(name)

    def both(self, name: str) -> tuple[Any, Any]:
        """Returns a parameter of both programs."""
        return self.small.params[name], self.large.params[name]

    def alike(self, *but: str) -> bool:
        """Whether all parameters are equal, except those named and those that place the value."""
        keys = self.small.params.keys() | self.large.params.keys()
        pairs = (
            (self.small.params.get(k), self.large.params.get(k)) for k in keys - {*but, *_PLACE}
        )
        return all(_alike(a, b) for a, b in pairs)

    def refuse(self, why: str) -> Relation:
        """Returns UNKNOWN: why, the operation and the line of the user's program."""
        result = f" {self.small.outvars[0].aval.str_short()}" if self.count else ""
        return unknown(f"{why}: {self.name!r}{result}", where(self.small))


_PLACE = ("sharding", "out_sharding", "weak_type")


def where(eqn: Any) -> str:
    """Returns the line of the user's program for an equation, or "" if JAX does not know it."""
    frames = getattr(getattr(eqn.source_info, "traceback", None), "frames", ())
    for frame in frames:
        if not any(part in frame.file_name for part in _LIBRARIES):
            return f" ({os.path.basename(frame.file_name)}:{frame.line_num})"
    return ""


_NAMES = ("jax", "flax", "optax", "equinox", "haiku", "chex")
_LIBRARIES = (
    os.path.dirname(os.path.dirname(__file__)),
    *(os.sep.join(("site-packages", name, "")) for name in _NAMES),
)


def _alike(a: Any, b: Any) -> bool:
    """Whether two parameters are equal; programs are, if their texts are."""
    if a is b:
        return True
    if isinstance(a, (tuple, list)) and type(a) is type(b) and len(a) == len(b):
        return all(map(_alike, a, b))
    if _compat.is_program(a):
        same = _alike(_compat.constants_within(a), _compat.constants_within(b))
        steps = (e for one in _compat.programs_within(a) for e in _compat.open_program(one).eqns)
        # The text of what JAX writes in terms of other operations does not say all.
        shown = "callback" not in str(a) and not any("_prim" in e.params for e in steps)
        return same and shown and str(a) == str(b)
    try:
        return type(a) is type(b) and bool(a == b)
    except (TypeError, ValueError):
        return False


def is_float(dtype: DTypeLike) -> bool:
    """Whether a dtype holds floats or complex numbers, those of ml_dtypes among them."""
    return bool(jnp.issubdtype(dtype, jnp.inexact))


# These return their operand, if the result is like it.
_NOTHING = frozenset(
    {"broadcast_in_dim", "convert_element_type", "reduce_sum", "reshape", "reshard"}
    | {"sharding_constraint"}
)


def without_placement(jaxpr: Any) -> tuple[list[Any], dict[int, Any]]:
    """Returns the equations that compute something, and what the results of others stand for.

    The others place values on devices, or are there because values have a place.
    """
    steps: list[Any] = []
    aliases: dict[int, Any] = {}
    for eqn in jaxpr.eqns:
        x, y = eqn.invars[:1], eqn.outvars[:1]
        alike = x and y and (x[0].aval.shape, x[0].aval.dtype) == (y[0].aval.shape, y[0].aval.dtype)
        if alike and eqn.primitive.name in _NOTHING and eqn.params.get("dimensions") is None:
            aliases[id(y[0])] = aliases.get(id(x[0]), x[0])
        else:
            steps.append(eqn)
    return steps, aliases
