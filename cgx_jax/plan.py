"""Plans: which leaf is reduced by which compressor, and which leaves travel together."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from cgx_jax.axes import Axes
from cgx_jax.compressors import Compressor, Quantize
from cgx_jax.compressors.base import require_stateless
from cgx_jax.compressors.buffers import Codec, ComposedCodec, QuantizeCodec
from cgx_jax.exchanges import auto
from cgx_jax.policies.rules import Leaf, Policy, Uniform
from cgx_jax.wire import FUSION_BYTES, Layout


@dataclasses.dataclass(frozen=True)
class Slot:
    """One leaf's place: its number and path in the tree, shape, dtype and compressor."""

    leaf: int
    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    compressor: Compressor

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


def _path(path: Any) -> str:
    # Flax NNX wraps each array; "kernel" is the leaf's name there as it is in Linen.
    if path and getattr(path[-1], "name", None) == "value":
        path = path[:-1]
    return jax.tree_util.keystr(path, simple=True, separator="/")


def leaves_of(tree: Any) -> list[Leaf]:
    """Every leaf of `tree` (arrays, tracers or ShapeDtypeStructs) as policies see it."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    out = []
    for path, x in flat:
        aval = jax.typeof(x) if not hasattr(x, "dtype") else x
        out.append(Leaf(_path(path), tuple(aval.shape), aval.dtype))
    return out


def is_bare(tree: Any) -> bool:
    """Whether `tree` is one array."""
    return bool(jax.tree_util.all_leaves([tree]))


def compressors_of(
    caller: str, leaves: Sequence[Leaf], policy: Compressor | Policy | Plan | None, *, bare: bool
) -> list[Compressor]:
    """What each leaf takes in a call that cuts no leaf into chunks; `bare` is a single array.

    A plan must fit the leaves. Raises ValueError and TypeError as `Plan.resolve` does.
    """
    if isinstance(policy, Plan):
        policy.check_leaves(leaves)
        chosen = [slot.compressor for slot in policy.slots]
    else:
        _require_static(caller, policy)
        chosen = _choose(leaves, policy, bare)
    for leaf, compressor in zip(leaves, chosen, strict=True):
        require_stateless(caller, compressor, leaf.path, leaf.shape, leaf.dtype)
    return chosen


def _choose(
    leaves: Sequence[Leaf], policy: Compressor | Policy | None, bare: bool
) -> list[Compressor]:
    policy = Quantize() if policy is None else policy
    if isinstance(policy, Policy):
        return policy.choose(leaves)
    if not isinstance(policy, Compressor):
        raise TypeError(
            f"Plan: {policy!r} is neither a compressor nor a policy; pass an instance such as "
            "cgx_jax.Quantize(bits=4)."
        )
    if bare and policy.supports(leaves[0].dtype):
        return [policy]
    return Uniform(policy).choose(leaves)


def rotates(compressor: Compressor) -> bool:
    """Whether `compressor` rotates buckets, which takes time."""
    return isinstance(compressor, Quantize) and compressor.rotation


def _require_static(caller: str, policy: Any) -> None:
    if isinstance(policy, Policy) and policy.adapts:
        raise ValueError(
            f"{caller}: {type(policy).__name__} adapts to statistics that this call cannot "
            "keep from step to step, so its plan would never change; use it in "
            "cgx_jax.sync_gradients, or pass Plan.build(tree, policy) for the plan it has now."
        )


def _check_override(path: str, dtype: np.dtype, compressor: Compressor) -> Compressor:
    if not compressor.lossless and not compressor.supports(dtype):
        raise TypeError(
            f"Plan: leaf {path!r} is {dtype}, which {compressor} cannot encode (it takes float32, "
            "bfloat16, float16); leave it out of overrides, or give it Identity()."
        )
    return compressor


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static, hashable result of a policy: what `jit` caches a reduction by.

    `slots` has one entry a leaf, in tree order; `buffers` are the fusion buffers, each a tuple
    of leaf numbers; leaves in none are reduced exactly. Make one with `Plan.build`.
    """

    slots: tuple[Slot, ...]
    buffers: tuple[tuple[int, ...], ...]

    @classmethod
    def build(
        cls,
        tree: Any,
        policy: Compressor | Policy | None = None,
        *,
        overrides: Mapping[str, Compressor] | None = None,
        fusion_bytes: int = FUSION_BYTES,
    ) -> Plan:
        """The plan for `tree` (arrays, tracers or ShapeDtypeStructs; local shapes).

        `policy` chooses a compressor for every leaf; a bare compressor stands for
        `Uniform(compressor)`, the default for `Quantize()`: leaves with ndim <= 1, under 1,024
        values or named as biases and norms are exact, as in CGX. A compressor given for a bare
        array takes it whatever its shape. `overrides` maps a leaf's path ("layer/kernel") to its
        compressor and goes before the policy. Consecutive leaves share a buffer of up to
        `fusion_bytes` uncompressed bytes. Raises ValueError for a path that is not in the tree,
        TypeError for an override that cannot encode its leaf.
        """
        if fusion_bytes <= 0:
            raise ValueError(f"Plan: fusion_bytes={fusion_bytes} must be positive.")
        named = dict(overrides or {})
        leaves = leaves_of(tree)
        chosen = _choose(leaves, policy, is_bare(tree))
        slots = []
        for i, (leaf, compressor) in enumerate(zip(leaves, chosen, strict=True)):
            if leaf.path in named:
                compressor = _check_override(leaf.path, leaf.dtype, named[leaf.path])
            slots.append(Slot(i, leaf.path, leaf.shape, leaf.dtype, compressor))
        unknown = [path for path in named if path not in {s.path for s in slots}]
        if unknown:
            path = unknown[0]
            close = difflib.get_close_matches(path, [s.path for s in slots], n=3, cutoff=0)
            raise ValueError(f"Plan: no leaf has the path {path!r}; the nearest are {close}.")
        for s in slots:
            if not (s.compressor.lossless or s.compressor.chunkable):
                raise TypeError(
                    f"Plan: {s.compressor} of leaf {s.path!r} is not chunkable, and the "
                    "scatter-reduce-allgather exchange cuts leaves into chunks."
                )
        return cls(tuple(slots), _fuse(slots, fusion_bytes))

    @classmethod
    def resolve(
        cls, caller: str, tree: Any, policy: Compressor | Policy | Plan | None, **options: Any
    ) -> Plan:
        """A plan as it is, if it fits `tree`; or what `build` makes of a policy or compressor.

        Raises ValueError for a policy that adapts: only `sync_gradients` keeps its statistics;
        and for a compressor with state.
        """
        if isinstance(policy, Plan):
            policy.check(tree)
            plan = policy
        else:
            _require_static(caller, policy)
            plan = cls.build(tree, policy, **options)
        plan.require_stateless(caller)
        return plan

    def require_stateless(self, caller: str) -> None:
        """Raises ValueError for a leaf whose compressor has state."""
        for s in self.slots:
            require_stateless(caller, s.compressor, s.path, s.shape, s.dtype)

    def check(self, tree: Any) -> None:
        """Raises ValueError at the first leaf of `tree` that differs from the plan's."""
        self.check_leaves(leaves_of(tree))

    def check_leaves(self, leaves: Sequence[Leaf]) -> None:
        """`check`, of a tree that is known by its leaves."""
        for slot, leaf in zip(self.slots, leaves, strict=False):
            if (slot.path, slot.shape, slot.dtype) != (leaf.path, leaf.shape, leaf.dtype):
                raise ValueError(
                    f"Plan: leaf {slot.leaf} is {leaf.path!r} {leaf.dtype}{list(leaf.shape)}, the "
                    f"plan has {slot.path!r} {slot.dtype}{list(slot.shape)}; build the plan from "
                    "the tree that is reduced (inside shard_map: from its local shapes; for "
                    "all_gather_compressed: from its result)."
                )
        if len(leaves) != len(self.slots):
            raise ValueError(
                f"Plan: the tree has {len(leaves)} leaves, the plan {len(self.slots)}; build the "
                "plan from the tree that is reduced."
            )

    def subset(self, leaves: tuple[int, ...]) -> Plan:
        """The plan of some leaves alone; noise streams are renumbered from 0."""
        slots = [dataclasses.replace(self.slots[i], leaf=n) for n, i in enumerate(leaves)]
        fused = {i for b in self.buffers for i in b}
        buffer = tuple(n for n, i in enumerate(leaves) if i in fused)
        return Plan(tuple(slots), (buffer,) if buffer else ())

    @property
    def exact(self) -> tuple[int, ...]:
        """Numbers of the leaves that are reduced by `lax.psum`."""
        fused = {i for buffer in self.buffers for i in buffer}
        return tuple(s.leaf for s in self.slots if s.leaf not in fused)

    def codec(self, buffer: tuple[int, ...], world: int) -> Codec:
        """How the leaves of `buffer` become rows of bytes for `world` ranks."""
        return _codec(tuple(self.slots[i] for i in buffer), world)

    def wire_bytes(self, world: int) -> int:
        """Bytes one rank sends in one reduction over `world` ranks, all leaves.

        Compressed leaves: world - 1 rows in each of the two phases. Exact ones: what a ring
        all-reduce sends, 2 (world - 1) / world of their bytes. A buffer that `exchange="auto"`
        sends by psum counts as compressed: this is the plan's arithmetic.
        """
        rows = sum(self.codec(b, world).row_bytes for b in self.buffers)
        exact = sum(self.slots[i].nbytes for i in self.exact)
        return 2 * (world - 1) * rows + -(-2 * (world - 1) * exact // world)

    def load(self, buffer: tuple[int, ...], units: Collection[int] = ()) -> auto.Load:
        """What the choice of an exchange for `buffer` depends on; leaves in `units` have units."""
        slots = [self.slots[i] for i in buffer]
        size = sum(s.size for s in slots)
        bits = sum(s.compressor.wire_bits(s.shape, s.dtype) for s in slots)
        noisy = sum(s.size for s in slots if s.compressor.needs_key)
        rotated = sum(s.size for s in slots if rotates(s.compressor))
        in_units = sum(s.size for s in slots if s.leaf in units)
        nbytes = sum(s.nbytes for s in slots)
        return auto.Load(size, nbytes, bits / size, noisy, rotated, in_units)

    def methods(
        self,
        caller: str,
        exchange: str,
        usable: tuple[str, ...],
        world: int,
        units: Collection[int] = (),
    ) -> dict[tuple[int, ...], str]:
        """How each fusion buffer travels: by an exchange, or "psum" where that is faster.

        Only quantized buffers have a fused call: the others travel by "xla" instead. `units` are
        the leaves that are compressed in units.
        """
        methods = {}
        for buffer in self.buffers if world > 1 else ():
            quantized = all(isinstance(self.slots[i].compressor, Quantize) for i in buffer)
            load = self.load(buffer, units)
            methods[buffer] = auto.resolve(caller, exchange, usable, world, load, quantized)
        return methods

    def compressed(self, caller: str, exchange: str, axes: Axes) -> list[int]:
        """Numbers of the leaves that a reduction over `axes` compresses, given `exchange`."""
        methods = self.methods(caller, exchange, auto.available(axes.names), axes.world)
        return [i for buffer, method in methods.items() if method != "psum" for i in buffer]

    def summary(self, world: int | None = None) -> str:
        """A table: leaf, shape, compressor, bits a value and payload bytes.

        With `world` ranks given, also the method that `exchange="auto"` takes for each leaf there,
        by the active profile or without one by size; what goes by "psum" is sent uncompressed.
        Raises ValueError when the profile was measured at another world size.
        """
        head = ("leaf", "shape", "compressor", "bits", "bytes", "method")
        rows = [head]
        total = 0
        method_of = {}
        if world is not None:
            methods = self.methods("summary", "auto", auto.available(), world)
            method_of = {i: method for buffer, method in methods.items() for i in buffer}
        for s in self.slots:
            method = method_of.get(s.leaf, "psum")
            exact = world is not None and method == "psum"
            bits = 8 * s.nbytes if exact else s.compressor.wire_bits(s.shape, s.dtype)
            nbytes = -(-bits // 8)
            total += nbytes
            per_value = f"{bits / s.size:.2f}" if s.size else "-"
            shape = f"{s.dtype}{list(s.shape)}"
            compressor, payload = str(s.compressor), f"{nbytes:,}"
            rows.append((s.path or ".", shape, compressor, per_value, payload, method))
        columns = range(5 if world is None else 6)
        widths = [max(len(r[c]) for r in rows) for c in columns]
        lines = [
            "  ".join(
                v.ljust(w) if c < 3 else v.rjust(w)
                for c, (v, w) in enumerate(zip(r, widths, strict=False))
            ).rstrip()
            for r in rows
        ]
        raw = sum(s.nbytes for s in self.slots)
        lines.insert(1, "-" * max(map(len, lines)))
        lines.append(
            f"{len(self.slots)} leaves in {len(self.buffers)} fusion buffers and "
            f"{len(self.exact)} exact: {total:,} of {raw:,} bytes ({raw / max(total, 1):.2f}x less)"
        )
        return "\n".join(lines)


def _fuse(slots: list[Slot], fusion_bytes: int) -> tuple[tuple[int, ...], ...]:
    """Consecutive lossy leaves of one family, up to `fusion_bytes` a buffer."""
    open_buffers: dict[type, list[int]] = {}
    filled: dict[type, int] = {}
    done: list[tuple[int, ...]] = []
    for s in slots:
        if s.compressor.lossless or s.size == 0:
            continue
        family = type(s.compressor)
        if family in open_buffers and filled[family] + s.nbytes > fusion_bytes:
            done.append(tuple(open_buffers.pop(family)))
        if family not in open_buffers:
            open_buffers[family], filled[family] = [], 0
        open_buffers[family].append(s.leaf)
        filled[family] += s.nbytes
    return tuple(sorted([*done, *map(tuple, open_buffers.values())]))


@functools.lru_cache(maxsize=1024)
def _codec(slots: tuple[Slot, ...], world: int) -> Codec:
    quantized = [s.compressor for s in slots if isinstance(s.compressor, Quantize)]
    if len(quantized) == len(slots):
        fields = tuple(q.slot(s.size, s.leaf) for q, s in zip(quantized, slots, strict=True))
        return QuantizeCodec(Layout(fields, world))
    return ComposedCodec(
        tuple(s.compressor for s in slots),
        tuple(s.size for s in slots),
        tuple(s.leaf for s in slots),
        world,
    )
