"""Whether a program for one example is the one for two and three, up to dimensions of one."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import numpy as np

from cgx_jax import _compat
from cgx_jax.relations.relation import where, without_placement

# JAX leaves these out, or adds them, where a dimension is one.
_RESHAPES = frozenset({"broadcast_in_dim", "reduce_sum", "reshape", "squeeze"})
# Parameters that follow from the shapes of operands and results.
_SHAPES = frozenset({"new_sizes", "shape", "slice_sizes"})
# Parameters that name dimensions of the result, and of the first operand.
_OF_RESULT = frozenset({"broadcast_dimensions", "dimension"})
_OF_OPERAND = frozenset({"axes", "axis", "dimensions", "permutation"})


def difference(one: Any, two: Any, three: Any) -> str | None:
    """Returns where closed jaxprs for one, two and three examples differ in more than sizes."""
    try:
        _Sizes().follow(one, two, three)
    except _Differs as found:
        return str(found)
    return None


class _Differs(Exception):
    pass


class _Sizes:
    """Each value for two examples has a twin for one, with the same shape but for ones."""

    def __init__(self) -> None:
        self.twins: dict[Any, Any] = {}
        self.aliases: dict[int, Any] = {}

    def follow(self, one: Any, two: Any, three: Any) -> None:
        """Walks the three programs together."""
        held = [list(getattr(x, "consts", ())) for x in (one, two, three)]
        one, two, three = map(_compat.open_program, (one, two, three))
        counts = [[*map(len, (x.invars, x.constvars, x.outvars))] for x in (one, two, three)]
        if counts[0] != counts[1] or counts[1] != counts[2]:
            raise _Differs("the number of arrays")
        steps = [without_placement(x) for x in (one, two, three)]
        for _, aliases in steps:
            self.aliases.update(aliases)
        self.pair(one.invars, two.invars, three.invars)
        self.pair(one.constvars, two.constvars, three.constvars)
        for a, b, c in zip(*held, strict=True):
            self.number(a, b, c, "a constant")
        ahead = collections.deque(steps[0][0])
        if len(steps[1][0]) != len(steps[2][0]):
            raise _Differs("two and three examples")
        for other, third in zip(steps[1][0], steps[2][0], strict=True):
            while not self.matches(ahead, other, third):
                # A step that only moves dimensions of one may be missing here or there.
                moves = _reshapes(other)
                twin = self.twin(other.invars[0]) if moves else None
                if moves and self.fits(twin, other.outvars[0], third.outvars[0]):
                    self.twins[other.outvars[0]] = twin
                    break
                self.skip(ahead, f"{other.primitive.name!r}{where(other)}")
            else:
                self.step(ahead.popleft(), other, third)
        while ahead:
            self.skip(ahead, f"{ahead[0].primitive.name!r}{where(ahead[0])}")
        if not all(self.wired(x, y) for x, y in zip(one.outvars, two.outvars, strict=True)):
            raise _Differs("a result")

    def skip(self, ahead: collections.deque[Any], at: str) -> None:
        """Leaves out a step for one example, if it only adds or removes dimensions of one."""
        if not ahead or not _reshapes(ahead[0]):
            raise _Differs(at)
        step = ahead.popleft()
        x, y = step.invars[0], step.outvars[0]
        if _without_ones(x.aval.shape) != _without_ones(y.aval.shape):
            raise _Differs(at)
        self.aliases[id(y)] = self.plain(x)

    def plain(self, x: Any) -> Any:
        return self.aliases.get(id(x), x)

    def twin(self, x: Any) -> Any:
        x = self.plain(x)
        return x if hasattr(x, "val") else self.plain(self.twins[x])

    def wired(self, x: Any, y: Any) -> bool:
        x, y = self.plain(x), self.plain(y)
        return (hasattr(x, "val") and hasattr(y, "val")) or x is self.twin(y)

    def matches(self, ahead: collections.deque[Any], other: Any, third: Any) -> bool:
        if not ahead or ahead[0].primitive != other.primitive:
            return False
        one = ahead[0]
        if len(one.invars) != len(other.invars):
            return False
        if not all(map(self.wired, one.invars, other.invars)):
            return False
        results = one.outvars[:1], other.outvars[:1], third.outvars[:1]
        return one.primitive.name not in _RESHAPES or self.fits(*(x for (x,) in results))

    def step(self, one: Any, two: Any, three: Any) -> None:
        """Compares literals, parameters, inner programs and the shapes of results."""
        at = f"{two.primitive.name!r}{where(two)}"
        if two.primitive != three.primitive:
            raise _Differs(at)
        for x, y, z in zip(one.invars, two.invars, three.invars, strict=True):
            x, y, z = self.plain(x), self.plain(y), self.plain(z)
            if hasattr(y, "val"):
                self.number(x.val, y.val, z.val, at)
        for key, y in two.params.items():
            x, z = one.params.get(key), three.params.get(key)
            steps = (one, two, three)
            values = map(_compat.written_out, steps) if key == "_prim" else (x, y, z)
            inner = [_compat.programs_in([v]) for v in values]
            if inner[1]:
                for programs in zip(*inner, strict=True):
                    self.follow(*programs)
            elif key == "_prim":
                raise _Differs(at)
            elif key not in ("sharding", "out_sharding", "weak_type", "context_mesh", "ctx_mesh"):
                self.parameter(key, steps, (x, y, z), at)
        self.pair(one.outvars, two.outvars, three.outvars, at)

    def parameter(self, key: str, steps: Any, values: Any, at: str) -> None:
        """Parameters are equal, sizes, or name the same dimensions but for those of one."""
        one, two, three = values
        if key in _SHAPES or str(one) == str(two) == str(three):
            return
        lists = [v if isinstance(v, tuple) else (v,) for v in values]
        numbers = all(isinstance(n, (int, np.integer)) for v in lists for n in v)
        named = key in _OF_RESULT | _OF_OPERAND
        if numbers and not named and len({*map(len, lists)}) == 1:
            triples = zip(*lists, strict=True)
            if all(a == b == c or (b != c and (2 * a, 3 * a) == (b, c)) for a, b, c in triples):
                return
        for field in ("start_index_map", "scatter_dims_to_operand_dims"):
            if hasattr(two, field):
                lists, named = [getattr(v, field) for v in values], True
        if not named or lists[1] != lists[2]:
            raise _Differs(at)
        x, y, z = (e.outvars[0] if key in _OF_RESULT else e.invars[0] for e in steps)
        shapes = x.aval.shape, _for_one(y, z)
        places = [
            [sum(n != 1 for n in shape[:d]) for d in dims if shape[d] != 1]
            for shape, dims in zip(shapes, lists[:2], strict=True)
        ]
        if places[0] != places[1]:
            raise _Differs(at)

    def number(self, one: Any, two: Any, three: Any, at: str) -> None:
        """Numbers are equal, or proportional to a power of the number of examples."""
        if one is two is three:
            return
        a, b, c = (np.asarray(x) for x in (one, two, three))
        if a.ndim or b.ndim or c.ndim:
            # Arrays of numpy's are equal, or longer for more examples.
            begins = all(
                x.ndim == y.ndim and np.array_equal(x, y[tuple(map(slice, x.shape))])
                for x, y in ((a, b), (b, c))
            )
            if not begins:
                raise _Differs(f"{at}, an array that depends on the number of examples")
        elif not (a == b == c or (a != a and b != b and c != c)):
            powers = [
                p for p in range(-4, 5) if np.allclose([b, c], [a * 2.0**p, a * 3.0**p], 1e-6, 0)
            ]
            if a == 0 or not powers:
                raise _Differs(f"{at}, {a} for one example, {b} for two, {c} for three")

    def pair(self, one: Any, two: Any, three: Any, at: str = "an input") -> None:
        for x, y, z in zip(one, two, three, strict=True):
            if not self.fits(x, y, z):
                shapes = x.aval.str_short(), y.aval.str_short()
                raise _Differs(f"{at}, {shapes[0]} for one example, {shapes[1]} for two")
            self.twins[y] = x

    @staticmethod
    def fits(one: Any, two: Any, three: Any) -> bool:
        """Whether the shape for one example follows from those for two and three."""
        return _without_ones(one.aval.shape) == _without_ones(_for_one(two, three))


def _for_one(two: Any, three: Any) -> list[int]:
    """Returns the shape for one example from those of values for two and three."""
    sizes = zip(two.aval.shape, three.aval.shape, strict=True)
    return [b if b == c else b // 2 for b, c in sizes]


def _reshapes(eqn: Any) -> bool:
    """Whether an equation keeps the order of values. A squeeze names the dimensions of one."""
    name = eqn.primitive.name
    return name in _RESHAPES and (name == "squeeze" or eqn.params.get("dimensions") is None)


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [n for n in shape if n != 1]
