"""What an adaptive policy knows at a step of a training, and its form in a checkpoint."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from cgx_jax.compressors import Compressor
from cgx_jax.leaves import Leaf
from cgx_jax.policies.decide import Compressors, Refresh
from cgx_jax.policies.menu import short_name
from cgx_jax.policies.statistics import Statistics

FORMAT = 2


@dataclasses.dataclass
class Progress:
    """What changes from step to step.

    `step` counts calls of the training step. `current` are the compressors of the adaptive leaves,
    `plans` all that were ever current, `history` the looks at the statistics. `pending` is a copy
    of statistics and the step from which on they are used. `nonfinite` float32[leaves] are the last
    look's, None before it.
    """

    current: Compressors = ()
    plans: list[Compressors] = dataclasses.field(default_factory=list)
    step: int = 0
    history: list[Refresh] = dataclasses.field(default_factory=list)
    pending: tuple[int, Statistics] | None = None
    nonfinite: np.ndarray | None = None


class Known:
    """Compressors that a checkpoint or another process may name: nothing else is ever made."""

    def __init__(self, compressors: Iterable[Compressor]) -> None:
        self._compressors = {json.dumps(_described(c), sort_keys=True): c for c in compressors}

    def find(self, described: Any, source: str) -> Compressor:
        """The compressor that `describe` described; ValueError, with the `source`, if not known."""
        found = self._compressors.get(json.dumps(described, sort_keys=True))
        if found is None:
            known = ", ".join(short_name(c) for c in self._compressors.values())
            raise ValueError(
                f"Adaptive: {source} has the compressor {json.dumps(described)}, which is neither "
                f"a candidate nor one that base gives an adaptive leaf; known are {known}. Pass "
                "the candidates and the base of the run that saved it."
            )
        return found


def _described(compressor: Compressor) -> dict[str, Any]:
    """A compressor in JSON types: its class and its options."""
    options: Sequence[Any] = dataclasses.fields(compressor)  # type: ignore[arg-type]
    values = {f.name: getattr(compressor, f.name) for f in options}
    simple = (bool, int, float, str, type(None))
    plain = {k: v if isinstance(v, simple) else str(v) for k, v in values.items()}
    return {"class": type(compressor).__name__, "options": plain}


def pack(plans: Sequence[Compressors]) -> dict[str, Any]:
    """Plans in JSON types: every compressor once, and for each leaf a number of one."""
    numbers = {c: i for i, c in enumerate(dict.fromkeys(c for plan in plans for c in plan))}
    return {
        "compressors": [_described(c) for c in numbers],
        "plans": [[numbers[c] for c in plan] for plan in plans],
    }


def unpack(packed: dict[str, Any], known: Known, source: str) -> list[Compressors]:
    """The plans that `pack` was given; raises ValueError for a compressor that is not known."""
    compressors = [known.find(described, source) for described in packed["compressors"]]
    return [tuple(compressors[i] for i in plan) for plan in packed["plans"]]


def save(progress: Progress, leaves: Sequence[Leaf]) -> dict[str, Any]:
    """`progress` and the tree that it is of, in JSON types."""
    pending = None
    if progress.pending is not None:
        due, measured = progress.pending
        pending = [due, [np.asarray(x.addressable_data(0)).tolist() for x in measured]]
    nonfinite = None if progress.nonfinite is None else progress.nonfinite.tolist()
    return {
        "format": FORMAT,
        "leaves": [[x.path, list(x.shape), str(x.dtype)] for x in leaves],
        "step": progress.step,
        "current": pack([progress.current]),
        "plans": pack(progress.plans),
        "history": [dataclasses.asdict(r) for r in progress.history],
        "pending": pending,
        "nonfinite": nonfinite,
    }


def check_format(state: dict[str, Any]) -> None:
    """Raises ValueError for what `save` of another version returned."""
    if state.get("format") != FORMAT:
        raise ValueError(
            f"Adaptive: the saved policy has format {state.get('format')}, this version of cgx_jax "
            f"reads {FORMAT}; without load_state_dict, the policy measures and chooses anew."
        )


def restore(state: dict[str, Any], known: Known, adaptive: int) -> Progress:
    """The progress that `save` was given, of a policy with so many `adaptive` leaves.

    Raises ValueError for a compressor that is not known, and for another number of leaves.
    """
    of = "the saved policy"
    (current,) = unpack(state["current"], known, of)
    if len(current) != adaptive:
        raise ValueError(
            f"Adaptive: {of} has {len(current)} adaptive leaves, and this one {adaptive}; pass the "
            "candidates and the base of the run that saved it."
        )
    pending = None
    if state["pending"] is not None:
        due, measured = state["pending"]
        pending = due, Statistics(*(jnp.asarray(x, jnp.float32) for x in measured))
    nonfinite = state["nonfinite"]
    return Progress(
        current=current,
        plans=unpack(state["plans"], known, of),
        step=state["step"],
        history=[Refresh.from_json(r) for r in state["history"]],
        pending=pending,
        nonfinite=None if nonfinite is None else np.array(nonfinite, np.float32),
    )
