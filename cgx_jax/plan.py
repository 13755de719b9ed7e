"""Plans: each leaf's compressor, and the fusion buffers in which leaves travel together."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from cgx_jax._types import Pytree
from cgx_jax.compressors import Compressor
from cgx_jax.compressors.base import CodedLeaf
from cgx_jax.kernels.wire import FUSION_BYTES
from cgx_jax.leaves import Leaf, is_bare, leaves_of, operand_of
from cgx_jax.policies.rules import DEFAULT, Policy, Uniform
from cgx_jax.policies.stages import Stages
from cgx_jax.reductions.named import reduction_of


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static, hashable result of a policy, by which `jit` caches a reduction.

    `leaves` (path, shape and dtype) and `compressors` have one entry per leaf, in tree order.
    `buffers` are the fusion buffers, each a tuple of leaf numbers. Leaves in no buffer are reduced
    exactly. Make a plan with `Plan.build`, which documents the errors.
    """

    leaves: tuple[Leaf, ...]
    compressors: tuple[Compressor, ...]
    buffers: tuple[tuple[int, ...], ...]

    @classmethod
    def build(
        cls,
        tree: Pytree,
        policy: Compressor | Policy | None = None,
        *,
        overrides: Mapping[str, Compressor] | None = None,
        fusion_bytes: int = FUSION_BYTES,
    ) -> Plan:
        """Builds the plan for `tree` (arrays, tracers or ShapeDtypeStructs; local shapes).

        `policy` chooses a compressor for every leaf. A bare compressor stands for
        `Uniform(compressor)`, and the default is `Quantize(bits=4, rotation=True)`: leaves with
        ndim <= 1, under 1,024 values or named as biases and norms are exact, as in CGX. If `tree`
        is a bare array, a bare compressor applies to it whatever its shape. `overrides` maps a
        leaf's path ("layer/kernel") to its compressor, and takes precedence over the policy.
        Consecutive leaves share a buffer of up to `fusion_bytes` uncompressed bytes. Raises
        ValueError for a path that is not in the tree and for `fusion_bytes` below 1, and TypeError
        for an override that cannot encode its leaf.
        """
        if fusion_bytes <= 0:
            raise ValueError(f"Plan.build: fusion_bytes={fusion_bytes} must be positive.")
        leaves = leaves_of(tree, "Plan.build")
        chosen = _choose("Plan.build", leaves, policy, is_bare(tree))
        return _planned(leaves, _overridden(leaves, chosen, dict(overrides or {})), fusion_bytes)

    @property
    def exact(self) -> tuple[int, ...]:
        """The numbers of the leaves that `lax.psum` reduces."""
        fused = {i for buffer in self.buffers for i in buffer}
        return tuple(i for i in range(len(self.leaves)) if i not in fused)

    def coded(self, part: Sequence[int]) -> tuple[CodedLeaf, ...]:
        """Returns some leaves with their compressors, in the form that reductions take."""
        return tuple(
            CodedLeaf(self.compressors[i], self.leaves[i].shape, self.leaves[i].dtype, i)
            for i in part
        )

    def subset(self, part: Sequence[int]) -> Plan:
        """Returns the plan of only these leaves, numbered from 0, which keep their buffers."""
        place = {i: n for n, i in enumerate(part)}
        kept = (tuple(place[i] for i in buffer if i in place) for buffer in self.buffers)
        return Plan(
            tuple(self.leaves[i] for i in part),
            tuple(self.compressors[i] for i in part),
            tuple(buffer for buffer in kept if buffer),
        )

    def in_buffers(self, fusion_bytes: int) -> Plan:
        """Returns the same leaves and compressors in buffers of up to `fusion_bytes`."""
        return _planned(self.leaves, self.compressors, fusion_bytes)

    def wire_bytes(self, world: int) -> int:
        """Returns the bytes that one rank sends to reduce all leaves over `world` ranks.

        Compressed leaves count by the first reduction that their compressor allows. Exact leaves
        count as in a ring all-reduce, 2 (world - 1) / world of their bytes; 16-bit leaves are
        summed in fp32. The plan does not know the exchange, so a buffer that `exchange="auto"`
        sends by psum counts as compressed. Raises TypeError for a leaf of random keys.
        """
        self.require_numbers("Plan.wire_bytes")
        total = 0
        for buffer in self.buffers:
            coded = self.coded(buffer)
            paths = [self.leaves[i].path for i in buffer]
            reduction = reduction_of("Plan", None, list(zip(paths, coded, strict=True)))
            total += reduction.bytes_sent(coded, world)
        exact = sum(self.leaves[i].sum_bytes for i in self.exact)
        return total + -(-2 * (world - 1) * exact // world)

    def check(self, caller: str, leaves: Sequence[Leaf]) -> None:
        """Raises ValueError for the first of `leaves` that differs from the plan's leaf."""
        for i, (own, leaf) in enumerate(zip(self.leaves, leaves, strict=False)):
            if own != leaf:
                raise ValueError(
                    f"{caller}: leaf {i} is {leaf}, but the plan has {own}; build the plan from "
                    "the tree that you reduce (inside shard_map and with specs=: from shards; for "
                    "all_gather_compressed: from its result)."
                )
        if len(leaves) != len(self.leaves):
            raise ValueError(
                f"{caller}: the tree has {len(leaves)} leaves, but the plan has "
                f"{len(self.leaves)}; build the plan from the tree that you reduce."
            )

    def require_numbers(self, caller: str) -> None:
        """Raises TypeError for a leaf of random keys."""
        for leaf in self.leaves:
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                raise TypeError(
                    f"{operand_of(caller, leaf.path)} is {leaf.dtype}, which is no number but a "
                    "key of jax.random; take it out of the tree."
                )

    def require_stateless(self, caller: str) -> None:
        """Raises ValueError for a leaf whose compressor has state, which the caller would lose."""
        for leaf, compressor in zip(self.leaves, self.compressors, strict=True):
            if compressor.has_state(leaf.shape, leaf.dtype):
                where = f" of leaf {leaf.path!r}" if leaf.path else ""
                raise ValueError(
                    f"{caller}: {compressor}{where} has state, which this call cannot keep from "
                    "step to step, so it would be lost; use cgx_jax.sync_gradients, which keeps it "
                    "in its own state, or a compressor without state."
                )


# What a call takes for the codes of its leaves.
Codes: TypeAlias = Compressor | Policy | Plan | None


def resolve(
    caller: str,
    tree: Pytree,
    policy: Codes,
    *,
    fusion_bytes: int = FUSION_BYTES,
    adapts: bool = False,
) -> Plan:
    """Returns the plan for `tree`: `policy` itself if it is a plan, or a newly built one.

    Raises ValueError for a plan of another tree. Also raises ValueError for a policy that adapts,
    unless `adapts` says that the caller keeps its statistics.
    """
    leaves = leaves_of(tree, caller)
    for leaf in leaves:
        if leaf.dtype.name.startswith("float6_"):
            raise TypeError(
                f"{caller}: leaf {leaf.path!r} is {leaf.dtype}, which XLA cannot compute with; "
                "make it float8_e4m3fn or wider before the call."
            )
    if isinstance(policy, Plan):
        policy.check(caller, leaves)
        return policy
    if isinstance(policy, Policy) and policy.adapts and not adapts:
        raise ValueError(
            f"{caller}: {type(policy).__name__} adapts to statistics that this call cannot "
            "keep from step to step, so its plan would never change; use it in "
            "cgx_jax.sync_gradients, or pass Plan.build(tree, policy) for the plan it has now."
        )
    return _planned(leaves, _choose(caller, leaves, policy, is_bare(tree)), fusion_bytes)


def lossy_leaves(
    caller: str, tree: Pytree, policy: Compressor | Policy | Plan | Stages | None
) -> set[int]:
    """Returns the numbers of the leaves that a policy compresses, in any of its stages."""
    stages = policy.policies if isinstance(policy, Stages) else (policy,)
    plans = [resolve(caller, tree, stage, adapts=True) for stage in stages]
    return {i for plan in plans for i, c in enumerate(plan.compressors) if not c.lossless}


def _choose(
    caller: str, leaves: Sequence[Leaf], policy: Compressor | Policy | None, bare: bool
) -> list[Compressor]:
    policy = DEFAULT if policy is None else policy
    require_policy(caller, policy)
    if isinstance(policy, Policy):
        return policy.choose(leaves)
    if bare and policy.supports(leaves[0].dtype):
        return [policy]
    return Uniform(policy).choose(leaves)


def require_policy(caller: str, policy: object) -> None:
    """Raises TypeError unless `policy` is a compressor, a policy, or None for the default."""
    if policy is not None and not isinstance(policy, Compressor | Policy):
        raise TypeError(
            f"{caller}: {policy!r} is neither a compressor nor a policy; pass an instance such as "
            "cgx_jax.Quantize(bits=4)."
        )


def _overridden(
    leaves: Sequence[Leaf], chosen: Sequence[Compressor], named: Mapping[str, Compressor]
) -> list[Compressor]:
    paths = [leaf.path for leaf in leaves]
    unknown = [path for path in named if path not in paths]
    if unknown:
        close = difflib.get_close_matches(unknown[0], paths, n=3, cutoff=0)
        raise ValueError(
            f"Plan.build: no leaf has the path {unknown[0]!r}; the nearest are {close}."
        )
    out = []
    for leaf, compressor in zip(leaves, chosen, strict=True):
        own = named.get(leaf.path)
        if own is not None and not own.lossless and not own.supports(leaf.dtype):
            raise TypeError(
                f"Plan.build: leaf {leaf.path!r} is {leaf.dtype}, which {own} cannot encode (it "
                "takes float32, bfloat16, float16); leave it out of overrides, or give it "
                "Identity()."
            )
        out.append(compressor if own is None else own)
    return out


def _planned(leaves: Sequence[Leaf], chosen: Sequence[Compressor], fusion_bytes: int) -> Plan:
    """Makes a plan; consecutive lossy leaves of a family share buffers of up to `fusion_bytes`."""
    pairs = enumerate(zip(leaves, chosen, strict=True))
    families = {i: (type(c), c.reductions) for i, (x, c) in pairs if x.size and not c.lossless}
    buffers = consecutive(leaves, families, fusion_bytes)
    return Plan(tuple(leaves), tuple(chosen), buffers)


def consecutive(
    leaves: Sequence[Leaf], families: Mapping[int, Any], most_bytes: int
) -> tuple[tuple[int, ...], ...]:
    """Groups consecutive leaves of the same family into buffers of up to `most_bytes`.

    A single leaf may be larger. `families` maps the number of each leaf that takes part to its
    family.
    """
    open_buffers: dict[Any, list[int]] = {}
    filled: dict[Any, int] = {}
    done: list[tuple[int, ...]] = []
    for i, family in families.items():
        nbytes = leaves[i].nbytes
        if family in open_buffers and filled[family] + nbytes > most_bytes:
            done.append(tuple(open_buffers.pop(family)))
        if family not in open_buffers:
            open_buffers[family], filled[family] = [], 0
        open_buffers[family].append(i)
        filled[family] += nbytes
    return tuple(sorted([*done, *map(tuple, open_buffers.values())]))
