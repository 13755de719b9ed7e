"""The ranks of a collective: its axes and world size, this rank's index, and exact sums."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import DTypeLike

from cgx_jax import _compat
from cgx_jax._types import AxisName, Pytree
from cgx_jax.leaves import operand_of, sum_dtype

# A leaf of up to this size travels with others: a separate call costs more than the copies.
SMALL_BYTES = 1 << 16
UNROLL = 4  # rows that one round of a loop over ranks adds, so that XLA may fuse them


def names_of(axis_name: AxisName) -> tuple[str, ...]:
    """Returns the names of one axis or of several."""
    names: Any = axis_name if isinstance(axis_name, tuple | list) else (axis_name,)
    return tuple(names)


def require_axes(caller: str, names: Sequence[str], mesh: Mesh | AbstractMesh) -> None:
    """Raises ValueError for an axis that is not in the mesh."""
    missing = [n for n in names if n not in mesh.axis_names]
    if missing:
        raise ValueError(
            f"{caller}: axis {missing[0]!r} is not in the mesh; it has {mesh.axis_names}. Name "
            "only these in axis_name."
        )


@dataclasses.dataclass(frozen=True)
class Axes:
    """Axis names with their world size and groups: static and hashable."""

    names: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...] | None
    world: int

    @classmethod
    def resolve(
        cls, caller: str, axis_name: AxisName, groups: Sequence[Sequence[int]] | None
    ) -> Axes:
        """Checks names and groups against the bound axes; raises ValueError if they do not fit."""
        names = names_of(axis_name)
        if any(isinstance(n, jax.Array | np.ndarray) for n in names):
            raise TypeError(
                f"{caller}: axis_name is an array; the first argument is what is reduced, and the "
                'second the name of an axis, such as "data".'
            )
        if any(isinstance(n, int) for n in names):
            raise TypeError(
                f"{caller}: axis_name={axis_name!r} is a dimension; pass the name of a mesh axis, "
                'such as "data".'
            )
        if not names or len(set(names)) != len(names):
            raise ValueError(
                f"{caller}: axis_name={axis_name!r} must name one or more axes, each once."
            )
        size = 1
        for n in names:
            try:
                size *= lax.axis_size(n)
            except (NameError, KeyError, TypeError):
                raise ValueError(
                    f"{caller}: axis {n!r} is not bound here; call it inside shard_map or pmap "
                    "(or vmap) over that axis. Bound by the mesh: "
                    f"{sorted(map(str, jax.sharding.get_abstract_mesh().manual_axes))}."
                ) from None
        _check_bound(caller, names, groups)
        if groups is None:
            return cls(names, None, size)
        frozen = tuple(tuple(int(i) for i in g) for g in groups)
        if sorted(i for g in frozen for i in g) != list(range(size)):
            raise ValueError(
                f"{caller}: axis_index_groups={groups} must hold every index below {size} once."
            )
        if len({len(g) for g in frozen}) != 1:
            raise ValueError(
                f"{caller}: axis_index_groups={groups} has groups of unequal size; compressed "
                "collectives need groups of equal size. Use lax.psum for these groups."
            )
        return cls(names, frozen, len(frozen[0]))

    def index(self) -> jax.Array:
        """Returns this rank's index along the axes, i32[]."""
        return lax.axis_index(self.names)

    def rank(self) -> jax.Array:
        """Returns this rank's index in its group, i32[]."""
        if self.groups is None:
            return self.index()
        place = np.zeros(sum(map(len, self.groups)), np.int32)
        for group in self.groups:
            place[list(group)] = np.arange(len(group))
        return jnp.asarray(place)[self.index()]

    def checked(self) -> bool:
        """Whether shard_map tracks which values vary over the axes (check_vma)."""
        return _compat.bound_by_mesh(self.names) and set(self.names) <= _compat.varying_axes(
            self.index()
        )

    def varying(self) -> frozenset[str]:
        """Axes over which a rank's own values are typed as varying; none outside check_vma."""
        return frozenset(self.names) if self.checked() else frozenset()

    @property
    def around(self) -> dict[Any, int]:
        """All manual axes of the mesh with their sizes; only `names` if vmap binds one of them."""
        mesh = jax.sharding.get_abstract_mesh()
        manual = [n for n in mesh.axis_names if n in mesh.manual_axes]
        names = manual if _compat.bound_by_mesh(self.names) else self.names
        return {n: lax.axis_size(n) for n in names}

    def on_every_rank(self, flag: jax.Array, *, alike: bool = False) -> jax.Array:
        """Returns, on every rank, whether `flag`, bool[], is True on all ranks of the mesh.

        `alike` says that `flag` is already the same along these axes, so they are not reduced over.
        """
        names = tuple(n for n in self.around if not (alike and n in self.names))
        if not names:
            return flag
        failed = jnp.asarray(~flag, jnp.int32)
        if _compat.bound_by_mesh(names):
            failed = _compat.vary_over(failed, frozenset(names))
        return lax.psum(failed, names) == 0

    def check_plain(self, caller: str, leaves: Sequence[tuple[str, Any]]) -> None:
        """Raises ValueError for a leaf typed as unreduced or as `reduced`."""
        for path, x in leaves:
            kinds = jax.typeof(x).mat
            for n in self.names:
                where = operand_of(caller, path)
                if n in kinds.unreduced:
                    raise ValueError(
                        f"{where} is typed as unreduced over axis {n!r}: each rank holds "
                        "a part, and the value is the sum of the parts. It is most often the "
                        "gradient of a parameter that is typed as reduced. Sum it first: "
                        f"cgx_jax.psum_compressed(x, {n!r}), or jax.lax.psum(x, {n!r})."
                    )
                if n in kinds.reduced:
                    raise ValueError(
                        f"{where} is typed as reduced over axis {n!r}: every rank holds "
                        "the value, and JAX leaves its gradient unreduced. Give shard_map the "
                        "in_specs P() for it, without reduced=, or outside jax.grad write "
                        f"jax.lax.pcast(x, {n!r}, to='varying')."
                    )

    def check_varying(self, caller: str, leaves: Sequence[tuple[str, Any]]) -> None:
        """Raises ValueError for a leaf that AD (or anything else) has already reduced.

        A leaf that is unreduced over all axes is one to sum: each rank holds a part of it.
        """
        if not self.checked():
            return
        for path, x in leaves:
            kinds = jax.typeof(x).mat
            where = operand_of(caller, path)
            mixed = kinds.unreduced & set(self.names)
            if mixed and (set(self.names) - mixed or not _compat.is_sum(kinds)):
                raise ValueError(
                    f"{where} is typed as {kinds}; this call sums values that vary over "
                    f"all of the axes {self.names}, or are unreduced sums over all of them. Reduce "
                    f"over {sorted(mixed)} first."
                )
            missing = [n for n in self.names if n not in kinds.varying | mixed]
            if missing:
                raise ValueError(
                    f"{where} does not vary over axis {missing[0]!r}, so every rank "
                    "holds the same value: it is already reduced, or was never split. Under "
                    "check_vma, jax.grad of a replicated parameter inserts its own uncompressed "
                    "psum. Either make the parameters vary before jax.grad, those that are frozen "
                    "too: params = jax.tree.map("
                    f"lambda p: jax.lax.pcast(p, {missing[0]!r}, to='varying'), "
                    "params). Or wrap them in "
                    "cgx_jax.reduce_in_backward(params, axis_name) and drop this call."
                )

    def sum(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns `lax.psum` of every leaf, added up in `sum_dtype`; small leaves together."""
        return self._divided(leaves, 1)

    def mean(self, leaves: Sequence[jax.Array], *, floats: bool = False) -> list[jax.Array]:
        """Returns `lax.pmean` of every leaf, like `sum`; divided before it is rounded.

        The mean of a leaf that is known to be the same on all ranks is that leaf. Means of integers
        are the nearest integers, or with `floats` as in lax.
        """
        checked, names = self.checked(), frozenset(self.names)
        kinds = [jax.typeof(x).mat for x in leaves]
        same = [checked and not names & (kind.varying | kind.unreduced) for kind in kinds]
        own = [x for x, known in zip(leaves, same, strict=True) if not known]
        means = iter(self._divided(own, self.world, floats))
        pairs = zip(leaves, same, strict=True)
        return [_as_mean(x, floats) if known else next(means) for x, known in pairs]

    def scatter(self, leaves: Sequence[jax.Array], *, mean: bool = False) -> list[jax.Array]:
        """Returns this rank's row of the sum or mean of every leaf, [world, ...], like `sum`."""
        divisor = self.world if mean else 1
        terms = [_term(x, divisor) for x in leaves]
        scatter = lambda xs: [  # noqa: E731
            lax.psum_scatter(x, self.names, axis_index_groups=self.groups) for x in xs
        ]
        totals = zip(_together(scatter, terms, rows=True), leaves, strict=True)
        return [divided(total, divisor, x.dtype) for total, x in totals]

    def gather(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns every rank's leaf, [world, ...]; small leaves travel together.

        The transpose is a sum, which runs in `sum_dtype`.
        """
        return _together(lambda joined: [_gathered(self, x) for x in joined], leaves)

    def max(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """Applies `lax.pmax` to every leaf; small leaves travel together."""
        return _together(self._by(lax.pmax, lambda rows: rows.max(0)), leaves)

    def _divided(
        self, leaves: Sequence[jax.Array], divisor: int, floats: bool = False
    ) -> list[jax.Array]:
        arrays = [jnp.asarray(x) for x in leaves]
        terms = [_term(x, divisor, floats) for x in arrays]
        add = self._by(lax.psum, lambda rows: rows.sum(0, dtype=rows.dtype))
        totals = zip(_together(add, terms), arrays, strict=True)
        return [divided(total, divisor, x.dtype, floats) for total, x in totals]

    def _by(
        self, collective: Callable[..., Any], of_rows: Callable[[jax.Array], jax.Array]
    ) -> Callable[[list[jax.Array]], list[jax.Array]]:
        if self.groups is None or not self.checked():
            return lambda xs: collective(xs, self.names, axis_index_groups=self.groups)

        # Under check_vma, lax refuses groups, so gather the group and reduce its rows.
        def of_group(x: jax.Array) -> jax.Array:
            x = _compat.vary_over(x, frozenset(self.names))
            return of_rows(lax.all_gather(x, self.names, axis_index_groups=self.groups))

        return lambda xs: list(map(of_group, xs))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gathered(axes: Axes, x: jax.Array) -> jax.Array:
    # XLA's gather of int2 writes past the end of its result.
    sent = cast(x, sum_dtype(x.dtype)) if x.dtype.name in ("int2", "uint2") else x
    return cast(lax.all_gather(sent, axes.names, axis_index_groups=axes.groups), x.dtype)


@_gathered.defjvp
def _gathered_jvp(axes: Axes, primals: Pytree, tangents: Pytree) -> Pytree:
    (t,) = tangents
    wide = lax.all_gather(cast(t, sum_dtype(t.dtype)), axes.names, axis_index_groups=axes.groups)
    return _gathered(axes, *primals), cast(wide, t.dtype)


def in_groups(grid: np.ndarray, own: Sequence[int], groups: Any = None) -> np.ndarray:
    """Returns the entries of a mesh's grid for each group of ranks over the dimensions `own`."""
    last = range(-len(own), 0)
    rows = np.moveaxis(grid, own, last).reshape(-1, math.prod(grid.shape[i] for i in own))
    return rows if groups is None else np.concatenate([rows[:, list(g)] for g in groups])


def axes_by_dimension(spec: PartitionSpec, ndim: int | None = None) -> tuple[tuple[str, ...], ...]:
    """Returns the mesh axes over which each dimension is sharded, of an array or of the spec."""
    more = 0 if ndim is None else ndim - len(spec.partitions)
    each = [*spec.partitions, *[None] * more]
    return tuple(() if e is None else e if isinstance(e, tuple) else (e,) for e in each)


def cast(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns `x` in `dtype`; `x` itself, weakly typed or not, if it has that dtype."""
    return x if x.dtype == dtype else x.astype(dtype)


def _term(x: jax.Array, divisor: int, floats: bool = False) -> jax.Array:
    """Returns what is summed of a leaf, in `sum_dtype`.

    The sum of integers that are not narrower may overflow where their mean does not. For a mean,
    their quotients and remainders are summed, along a new last dimension.
    """
    if divisor != 1 and not floats and _fills_sum(x.dtype):
        return jnp.stack(jnp.divmod(x, divisor), -1)
    return cast(x, sum_dtype(x.dtype))


def _fills_sum(dtype: DTypeLike) -> bool:
    return jnp.issubdtype(dtype, jnp.integer) and sum_dtype(dtype) == dtype


def divided(total: jax.Array, divisor: int, dtype: DTypeLike, floats: bool = False) -> jax.Array:
    """Returns the sum of `_term`s of values of `dtype`, or its quotient.

    A sum has the dtype that lax gives it. The mean of integers is the nearest one, and the even one
    of two, or with `floats` a float.
    """
    if divisor == 1:
        return total if dtype == jnp.bool_ else cast(total, dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return cast(total / divisor, dtype)
    if floats:
        return total / divisor
    # What wraps in between is right in the end, since the mean has room.
    whole, rest = (total[..., 0], total[..., 1]) if _fills_sum(dtype) else (0, total)
    more, rest = jnp.divmod(rest, divisor)
    whole = whole + more
    up = (2 * rest > divisor) | ((2 * rest == divisor) & (whole % 2 == 1))
    return cast(whole + up.astype(whole.dtype), dtype)


def in_rank_order(f: Callable[..., jax.Array], total: jax.Array, rows: Pytree) -> jax.Array:
    """Folds total = f(total, rank, row) over the ranks in order, in a program of fixed size.

    `rows` are arrays whose first dimension is the ranks. The first rank is handled outside the
    loop, so that the value that the loop carries varies over the same axes as the rows.
    """
    first, others = (jax.tree.map(lambda x, part=part: x[part], rows) for part in (0, np.s_[1:]))
    total = f(total, 0, first)
    ranks = np.arange(1, len(jax.tree.leaves(rows)[0]), dtype=np.int32)
    return lax.scan(lambda t, x: (f(t, *x), None), total, (ranks, others), unroll=UNROLL)[0]


def _as_mean(x: jax.Array, floats: bool) -> jax.Array:
    """Returns `x` as `mean` returns it where all ranks hold it."""
    x = jnp.asarray(x)
    inexact = jnp.issubdtype(x.dtype, jnp.inexact)
    return x.astype(jnp.result_type(float)) if floats and not inexact else x


def sum_of_rows(rows: jax.Array) -> jax.Array:
    """Sums [ranks, ...] over the first dimension, in rank order.

    On CPUs, XLA's own sum over a few long rows takes many times as long as a loop over them. Small
    arrays use XLA's sum, since a loop adds a separate computation to the program.
    """
    if rows[0].nbytes <= SMALL_BYTES:
        return rows.sum(0)
    return in_rank_order(lambda total, rank, row: total + row, jnp.zeros_like(rows[0]), rows)


def _together(
    reduce: Callable[[list[jax.Array]], list[jax.Array]],
    leaves: Sequence[jax.Array],
    *,
    rows: bool = False,
) -> list[jax.Array]:
    """Applies `reduce` to all leaves, with small leaves of one type joined into one array.

    With `rows`, leaves have a leading dimension over which they are reduced. XLA issues one
    collective per array, and on a network each collective costs a latency.
    """
    lead = int(rows)
    arrays = [jnp.asarray(x) for x in leaves]
    alike: dict[Any, list[int]] = {}
    for i, x in enumerate(arrays):
        whole = not any(jax.typeof(x).sharding.spec)  # over the axes of an explicit mesh
        if 0 < x.nbytes <= SMALL_BYTES and not x.aval.weak_type and whole:
            alike.setdefault((x.dtype, jax.typeof(x).mat), []).append(i)
    groups = [numbers for numbers in alike.values() if len(numbers) > 1]
    joined = {i for numbers in groups for i in numbers}
    alone = [i for i in range(len(arrays)) if i not in joined]
    flat = [
        jnp.concatenate([arrays[i].reshape(*arrays[i].shape[:lead], -1) for i in numbers], lead)
        for numbers in groups
    ]
    reduced = reduce([arrays[i] for i in alone] + flat)
    out = dict(zip(alone, reduced[: len(alone)], strict=True))
    for numbers, values in zip(groups, reduced[len(alone) :], strict=True):
        shapes = [arrays[i].shape[lead:] for i in numbers]
        parts = split(values, [math.prod(s) for s in shapes], values.ndim - 1)
        joined_parts = zip(numbers, parts, shapes, strict=True)
        out.update((i, y.reshape(*y.shape[:-1], *s)) for i, y, s in joined_parts)
    return [out[i] for i in range(len(arrays))]


def split(x: jax.Array, sizes: Sequence[int], axis: int = 0) -> list[jax.Array]:
    """Returns the parts of these sizes that follow one another in `x` along an axis.

    XLA compiles equal parts of a program once. Slices that differ in a constant are not equal, so
    their starts are hidden from it.
    """
    starts = hidden(np.cumsum([0, *sizes[:-1]]))
    parts = zip(starts, sizes, strict=True)
    return [lax.dynamic_slice_in_dim(x, start, size, axis) for start, size in parts]


def unstack(x: jax.Array) -> list[jax.Array]:
    """Returns x[0], x[1] and so on, by equal parts of a program as in `split`."""
    return [lax.dynamic_index_in_dim(x, i, keepdims=False) for i in hidden(range(len(x)))]


def hidden(numbers: Iterable[int]) -> list[jax.Array]:
    """Returns i32[] numbers that XLA takes for results of a computation."""
    constants = [np.int32(n) for n in numbers]
    return lax.optimization_barrier(constants)


def after(number: jax.Array, arrays: Iterable[Any]) -> jax.Array:
    """Returns `number`, i32[], so that a branch on it runs after `arrays` are computed.

    On CPUs, XLA runs the collectives of a branch beside those outside of it, and in another order
    on each device. They then take each other's messages: values are wrong, or the process crashes.
    Under vmap, the result stays one number, so that the branch does not become a selection.
    """
    arrays = list(arrays)
    if not arrays:
        return number
    (zero,) = hidden([0])
    first = [_a_bit_of(x) for x in arrays]
    axes = frozenset().union(*map(_compat.varying_axes, first))
    seen = jnp.concatenate([_compat.vary_over(x, axes) for x in first]).any()
    same = number + _compat.same_everywhere(zero * seen.astype(jnp.int32))
    # XLA would otherwise compute it again for each branch.
    return lax.optimization_barrier(same)


def _a_bit_of(x: jax.Array) -> jax.Array:
    """Returns bool[1], which cannot be known before `x`."""
    if any(jax.typeof(x).sharding.spec):  # JAX does not flatten what is sharded over explicit axes
        return (x != 0).any()[None]
    return jnp.ravel(x)[:1].astype(bool)


def _check_bound(
    caller: str, names: tuple[str, ...], groups: Sequence[Sequence[int]] | None
) -> None:
    """Raises ValueError for uses of vmap axes that `lax.psum` does not support either."""
    of_vmap = [n for n in names if not _compat.bound_by_mesh((n,))]
    if groups is not None and of_vmap:
        raise ValueError(
            f"{caller}: axis_index_groups={groups} over {of_vmap[0]!r}, an axis of vmap. As in "
            "lax.psum, groups work only over axes of shard_map and pmap. Split the axis in two, "
            "x.reshape(groups, size, ...), and reduce over the inner axis."
        )
    of_mesh = tuple(n for n in names if n not in of_vmap)
    if of_vmap and set(of_mesh) & _compat.varying_axes(lax.axis_index(names)):
        raise ValueError(
            f"{caller}: axis_name={names} mixes axes of vmap and of a mesh, which neither this "
            "call nor lax.psum supports under check_vma; reduce over one axis at a time, or pass "
            "check_vma=False to shard_map."
        )
