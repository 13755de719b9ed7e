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
    `plans` all choices that were ever current, and `history` the looks at the statistics. `pending`
    is a step and a copy of statistics that are used from that step on. `nonfinite`,
    float32[leaves], is that of the last look, and None before the first.
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
        """Returns the compressor so described; raises ValueError, naming `source`, if unknown."""
        found = self._compressors.get(json.dumps(described, sort_keys=True))
        if found is None:
            known = ", ".join(short_name(c) for c in self._compressors.values())
            raise ValueError(
                f"Adaptive: {source} has the compressor {json.dumps(described)}, which is neither "
                f"a candidate nor one that base gives an adaptive leaf ({known}). Pass the "
                "candidates and the base of the run that saved it."
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
    """Returns plans in JSON types: every compressor once, and each leaf's index into these."""
    numbers = {c: i for i, c in enumerate(dict.fromkeys(c for plan in plans for c in plan))}
    return {
        "compressors": [_described(c) for c in numbers],
        "plans": [[numbers[c] for c in plan] for plan in plans],
    }


def unpack(packed: dict[str, Any], known: Known, source: str) -> list[Compressors]:
    """Returns the plans that `pack` was given; raises ValueError for an unknown compressor."""
    compressors = [known.find(described, source) for described in packed["compressors"]]
    return [tuple(compressors[i] for i in plan) for plan in packed["plans"]]


def save(progress: Progress, leaves: Sequence[Leaf]) -> dict[str, Any]:
    """Returns `progress` and the leaves of its tree, in JSON types."""
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
    """Raises ValueError for a state from `save` of another version."""
    if state.get("format") != FORMAT:
        raise ValueError(
            f"Adaptive: the saved policy has format {state.get('format')}, but this version of "
            f"cgx_jax reads {FORMAT}; without load_state_dict, the policy measures and chooses "
            "again."
        )


def restore(state: dict[str, Any], known: Known, adaptive: int) -> Progress:
    """Returns the progress that `save` was given; `adaptive` is the number of adaptive leaves.

    Raises ValueError for an unknown compressor, and for another number of leaves.
    """
    of = "the saved policy"
    (current,) = unpack(state["current"], known, of)
    if len(current) != adaptive:
        raise ValueError(
            f"Adaptive: {of} has {len(current)} adaptive leaves, but this one has {adaptive}; pass "
            "the candidates and the base of the run that saved it."
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
