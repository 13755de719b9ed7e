"""Which state `update` takes: one of these leaves and options, with its types and its own row.

The trees in a state and the shapes of its arrays say which leaves it was made for, so it carries
nothing else for these checks.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from cgx_jax._types import Pytree
from cgx_jax.axes import names_of
from cgx_jax.leaves import Leaf, path_of, same_structure, with_paths
from cgx_jax.plan import Plan
from cgx_jax.policies.adaptive import Adaptive
from cgx_jax.policies.statistics import Statistics
from cgx_jax.transforms.memory import Memory
from cgx_jax.transforms.precondition import Moments, SecondMoment
from cgx_jax.transforms.state import (
    Choices,
    CodeState,
    InRates,
    SyncState,
    has_state,
    kept_by,
    ranks_in,
    restored,
    trees_of,
)

_INJECT = (
    "optax.inject_hyperparams turns numbers into arrays and callables into schedules; inject the "
    "optimizer beside it instead, such as optax.inject_hyperparams(optax.adam)(learning_rate=...)."
)

# Leaves whose shapes a message names.
_MOST_NAMED = 8

OTHER_LEAVES = (
    "Use the state that init returned for these parameters. Parameters that were renamed or "
    "reshaped since the checkpoint need a new state."
)


class Expected(NamedTuple):
    """The leaves that a state must have been made for.

    `caller` is the call that the user wrote, and `remedy` says what to do about another state.
    """

    caller: str
    leaves: Sequence[Leaf]
    treedef: jax.tree_util.PyTreeDef
    remedy: str = OTHER_LEAVES


def require_options(
    caller: str, axis_name: Any, mesh: Any, memory: Any, precondition: Any, seed: Any
) -> None:
    """Raises TypeError for an option of another type, such as a class in place of an instance.

    Raises ValueError for a seed of which JAX would drop bits.
    """
    if any(isinstance(n, jax.Array) for n in names_of(axis_name)):
        raise TypeError(f"{caller}: axis_name={axis_name!r} is an array, not a name. {_INJECT}")
    if mesh is not None and not isinstance(mesh, (Mesh, AbstractMesh)):
        raise TypeError(f"{caller}: mesh={mesh!r} is not a jax.sharding.Mesh. {_INJECT}")
    for name, value, kind, example in (
        ("memory", memory, Memory, "ErrorFeedback"),
        ("precondition", precondition, SecondMoment, "SecondMoment"),
    ):
        if value is not None and not isinstance(value, kind):
            raise TypeError(
                f"{caller}: {name}={value!r} is no {kind.__name__}; pass an instance such as "
                f"cgx_jax.{example}(), or None."
            )
    known = isinstance(seed, int) and not isinstance(seed, bool)
    whole = jnp.issubdtype(getattr(seed, "dtype", bool), jnp.integer)
    if not known and (not whole or np.ndim(seed)):
        raise TypeError(f"{caller}: seed={seed!r} is not an integer; pass a Python int.")
    bits, most = (64, 2**63) if jax.config.jax_enable_x64 else (32, 2**32)
    most = 2**64 if bits == 64 and isinstance(seed, np.uint64) else most
    if not isinstance(seed, jax.Array) and not -(2 ** (bits - 1)) <= seed < most:
        raise ValueError(
            f"{caller}: seed={seed} does not fit into {bits} bits; pass a smaller one."
        )


def require_type(caller: str, state: Pytree, kind: type) -> None:
    """Raises ValueError unless `state`, as `update` receives it, is a `kind` with all its parts."""
    parts: list[tuple[Pytree, type]] = [(state, kind)]
    if isinstance(state, SyncState):
        optional = (
            (state.codes, CodeState),
            (state.moments, Moments),
            (state.statistics, Statistics),
        )
        parts += [(x, t) for x, t in optional if not (isinstance(x, tuple) and not x)]
        parts.append((state.memory, tuple))
    for x, wanted in parts:
        if not isinstance(x, wanted):
            raise restored(caller, x, wanted)


def check_paths(caller: str, plan: Plan, leaves: Sequence[Leaf]) -> None:
    """Raises ValueError if `plan` has other paths than the parameters; shapes may be local."""
    pairs = itertools.zip_longest(plan.leaves, leaves)
    for own, leaf in pairs:
        if own is None or leaf is None or own.path != leaf.path:
            raise ValueError(
                f"{caller}: the plan was built for other leaves: it has {own or 'no leaf'} where "
                f"the parameters have {leaf or 'no leaf'}; build it from the gradients' tree."
            )


def check_statistics(
    caller: str, statistics: Pytree, policy: Adaptive, leaves: Sequence[Leaf]
) -> None:
    """Raises ValueError for statistics of another policy or of other leaves."""
    expected = jax.eval_shape(lambda: policy.empty_statistics(leaves))
    found, wanted = ([list(x.shape) for x in jax.tree.leaves(t)] for t in (statistics, expected))
    if found != wanted:
        kept = f"the policy keeps {wanted} for these leaves"
        raise _of_other_options(caller, f"statistics of shapes {found}", kept)
    require_dtypes(caller, "statistics", statistics, expected)


def require_whole(caller: str, state: SyncState) -> None:
    """Raises ValueError for a state of what needs whole gradients, given shards of them."""
    if jax.tree.leaves((state.statistics, state.codes, state.overflow)):
        raise ValueError(
            f"{caller}: an Adaptive policy, and compressors that keep a state or count what found "
            "no room, need whole gradients, but some are sharded over other axes of the mesh. Use "
            "a fixed policy of other compressors, such as Quantize(bits=4, rotation=True)."
        )


def check_state(
    state: SyncState,
    expected: Expected,
    memory: Memory | None,
    precondition: SecondMoment | None,
    choices: Choices,
    whole: Sequence[tuple[int, ...]],
) -> None:
    """Raises ValueError if `state` belongs to other leaves, or to other options.

    `whole` are the shapes of whole leaves, if those expected are shards: moments are of these.
    """
    caller, leaves = expected.caller, expected.leaves
    require_count(caller, "step", state.step)
    require_count(caller, "skipped", state.skipped)
    kept, trees = kept_by(memory), trees_of(state.memory)
    if len(trees) != kept:
        raise _of_other_options(
            caller, f"{len(trees)} arrays per leaf", f"memory={memory} keeps {kept}"
        )
    if memory is not None and memory.in_rates != isinstance(state.memory, InRates):
        held = "of gradients" if memory.in_rates else "of gradients times learning rates"
        has = f"{type(memory).__name__} has {'a' if memory.in_rates else 'no'} learning_rate"
        raise _of_other_options(caller, f"residuals {held}", has)
    own = state.codes.own if isinstance(state.codes, CodeState) else ()
    require_own_row(caller, (state.memory, own, state.overflow))
    require_paths(expected, "memory", trees)
    for tree in trees:
        require_rows(expected, "memory", tree)
        for x, leaf in zip(jax.tree.leaves(tree), leaves, strict=True):
            inexact = jnp.issubdtype(x.dtype, jnp.inexact)
            if jnp.issubdtype(leaf.dtype, jnp.inexact) and not inexact:  # rounds residuals to 0
                raise ValueError(
                    f"{caller}: the memory of leaf {leaf.path!r} is {x.dtype}, but the gradient is "
                    f"{leaf.dtype}; give init parameters of a floating dtype."
                )
            if inexact and x.dtype.itemsize < 4:
                raise _cast(caller, f"memory of leaf {leaf.path!r}", x, "fp32 or wider")
    if state.overflow != ():
        require_paths(expected, "overflow", (state.overflow,))
    elif memory is not None:
        # Init counts for compressors that take the parameters' dtypes, which are the memory's.
        kinds = zip(choices, jax.tree.leaves(trees[0]), strict=True)
        rooms = [c for some, x in kinds for c in some if c.has_rooms and c.supports(x.dtype)]
        if rooms:
            raise _of_other_options(caller, "no counts of overflow", f"{rooms[0]} needs them")
    _check_codes(expected, state.codes, choices)
    if (precondition is None) != (state.moments == ()):
        held = "no moments" if state.moments == () else "moments"
        raise _of_other_options(caller, held, f"precondition={precondition}")
    if precondition is None:
        return
    require_paths(expected, "moments", (state.moments.lines,))
    like = [
        jax.ShapeDtypeStruct(shape, leaf.dtype) for shape, leaf in zip(whole, leaves, strict=True)
    ]
    made = jax.eval_shape(lambda: precondition.init(like))
    held, needed = (moments.factors.shape[1] for moments in (state.moments, made))
    if held != needed:
        shapes = ", ".join(str(list(x.shape)) for x in like[:_MOST_NAMED])
        more = ", ..." if len(like) > _MOST_NAMED else ""
        raise ValueError(
            f"{caller}: the state was made for leaves of other shapes: its moments have "
            f"{held} factors, but the gradients ({shapes}{more}) need {needed}. {expected.remedy}"
        )
    require_dtypes(caller, "moments", state.moments, made)


def _of_other_options(caller: str, held: str, wanted: str) -> ValueError:
    return ValueError(
        f"{caller}: the state holds {held}, but {wanted}; it was made with other options. Use the "
        "state from this transformation's init, or restore one that was made with the same options."
    )


def require_count(caller: str, name: str, x: Any) -> None:
    """Raises ValueError unless a state's number of steps is still an integer."""
    if jnp.ndim(x) or not jnp.issubdtype(jnp.result_type(x), jnp.integer):
        raise _cast(caller, name, x, "int32[]")


def require_dtypes(caller: str, what: str, state: Pytree, made: Pytree) -> None:
    """Raises ValueError if a part of the state has other dtypes than init makes."""
    for x, own in zip(jax.tree.leaves(state), jax.tree.leaves(made), strict=True):
        if x.dtype != own.dtype:
            raise _cast(caller, what, x, str(own.dtype))


def _cast(caller: str, what: str, x: Any, made: str) -> ValueError:
    return ValueError(
        f"{caller}: the state's {what} is {jnp.result_type(x)}{list(jnp.shape(x))}, but init makes "
        f"it {made}; it was cast or stacked since. Restore the state with the target "
        "jax.eval_shape(tx.init, params), and cast only parameters."
    )


def require_own_row(caller: str, tree: Pytree) -> None:
    """Raises ValueError unless each array of `tree` has the one row of this rank."""
    rows = {x.shape[0] for x in jax.tree.leaves(tree) if x.ndim} - {1}
    if rows:
        raise ValueError(
            f"{caller}: the memory has {rows.pop()} rows here, but a rank has one. Inside "
            "shard_map, split the state: in_specs=cgx_jax.state_specs(state, axis_name). Under "
            "pmap, let each rank make its own: state = jax.pmap(tx.init, axis_name=...)(params), "
            "with parameters that are replicated already. A state of another number of ranks "
            "needs cgx_jax.resize_state first."
        )


def require_rows_of(caller: str, state: Pytree, world: int) -> None:
    """Raises ValueError unless the memories in `state`, a whole one, are those of `world` ranks."""
    if others := ranks_in(caller, state) - {world}:
        raise ValueError(
            f"{caller}: the state is that of {others.pop()} ranks, but the axis has {world}; call "
            f"cgx_jax.resize_state(state, {world}) first."
        )


def require_paths(
    expected: Expected, what: str, trees: Sequence[Any], *, subtrees: bool = False
) -> None:
    """Raises ValueError unless `trees`, a part of the state, have the paths that are expected.

    With `subtrees`, a tree has a subtree at each path.
    """
    ours = [leaf.path for leaf in expected.leaves]
    known = frozenset(ours)
    stop = lambda path, _: path_of(path) in known  # noqa: E731
    flat = functools.partial(
        jax.tree_util.tree_leaves_with_path, is_leaf=stop, is_leaf_takes_path=True
    )
    theirs = [
        [path_of(path) for path, _ in (flat if subtrees else with_paths)(tree)]
        for tree in trees
        if jax.tree.structure(tree) != expected.treedef
    ]
    wrong = next((paths for paths in theirs if paths != ours), None)
    if wrong is None:
        return
    places = [pair for pair in itertools.zip_longest(ours, wrong) if pair[0] != pair[1]]
    mine = next((x for x, _ in places if x not in wrong), places[0][0])
    other = next((x for x in itertools.chain(*theirs) if x not in known), places[0][1])
    mine, other = ("no such leaf" if x is None else f"leaf {x!r}" for x in (mine, other))
    raise ValueError(
        f"{expected.caller}: the state was made for other leaves: its {what} has {other}, where "
        f"the gradients have {mine}. {expected.remedy}"
    )


def require_rows(expected: Expected, what: str, tree: Pytree) -> None:
    """Raises ValueError unless `tree`, a part of the state, has a row of each leaf's shape."""
    for x, leaf in zip(jax.tree.leaves(tree), expected.leaves, strict=True):
        if x.shape != (1, *leaf.shape):
            raise ValueError(
                f"{expected.caller}: the state of leaf {leaf.path!r} was made for another shape: "
                f"its {what} is {list(x.shape)}, but the gradient, {list(leaf.shape)}, needs "
                f"{[1, *leaf.shape]}. {expected.remedy}"
            )


def _check_codes(expected: Expected, codes: Pytree, choices: Choices) -> None:
    caller, leaves, treedef, remedy = expected
    needy = [
        (c, leaf)
        for leaf, some in zip(leaves, choices, strict=True)
        for c in some
        if has_state(c, leaf)
    ]
    if codes == ():
        if needy:
            compressor, leaf = needy[0]
            raise ValueError(
                f"{caller}: the state holds nothing for {compressor} of leaf {leaf}. Its init saw "
                "other options, or parameters of a dtype that this compressor does not take. Use "
                "the state from this transformation's init for parameters in the gradients' dtypes."
            )
        return
    require_paths(expected, "codes", (*codes.own, *codes.shared), subtrees=True)
    most = max(map(len, choices), default=0)
    if counts := {len(codes.own), len(codes.shared)} - {most}:
        trees = f"{min(counts)} tree(s) of compressors' states"
        raise _of_other_options(caller, trees, f"the policy needs {most}")
    try:
        own, shared = (list(map(treedef.flatten_up_to, trees)) for trees in codes)
    except ValueError as error:
        raise ValueError(
            f"{caller}: the state was made for a tree of other types: {error} {remedy}"
        ) from None
    for i, (leaf, some) in enumerate(zip(leaves, choices, strict=True)):
        for (place, compressor), is_shared in itertools.product(enumerate(some), (False, True)):
            make = functools.partial(compressor.init, leaf.shape, leaf.dtype)
            keeps = has_state(compressor, leaf) and compressor.shares_state == is_shared
            wanted: Any = jax.eval_shape(make) if keeps else ()
            shapes = [list(x.shape) for x in jax.tree.leaves(wanted)]
            kept = (shared if is_shared else own)[place][i]
            skip = 0 if is_shared else 1  # the row of this rank
            found = [list(x.shape[skip:]) for x in jax.tree.leaves(kept)]
            if shapes != found or not same_structure(kept, wanted):
                held = "that of other compressors" if shapes == found else found
                raise ValueError(
                    f"{caller}: the state of {compressor} of leaf {leaf.path!r} is {held} here, "
                    f"but its init makes {shapes}. It was made for another shape, or with other "
                    f"options. {remedy}"
                )
            require_dtypes(
                caller, f"{type(compressor).__name__} part of leaf {leaf.path!r}", kept, wanted
            )
