"""The part of the soak that has a state: error feedback, whose account must balance.

Over any number of steps, the sum of the gradients' means is the sum of what came out plus the mean
of the memories, up to rounding. The account continues when a rank is killed and when the number of
ranks changes.
"""

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.append(str(Path(__file__).resolve().parents[1]))

import cgx_jax
import measure
from cgx_jax.compressors import Quantize, TopK

CODES = [Quantize(4), TopK(0.1)]
SHAPES = {"w": (40, 50), "v": (1, 300)}
SAVE_EVERY = 64  # steps of all codes together


class Feedback:
    """One transformation for each of `CODES`; they take turns."""

    def __init__(self, mesh: Any, exchange: str) -> None:
        self.mesh, self.world, self.turn = mesh, mesh.shape["data"], 0
        self.transforms = [
            cgx_jax.sync_gradients(
                "data",
                cgx_jax.Rules((), code, exact=()),
                memory=cgx_jax.ErrorFeedback(),
                mesh=mesh,
                exchange=exchange,
            )
            for code in CODES
        ]
        params = {k: np.zeros(s, np.float32) for k, s in SHAPES.items()}
        states = [tx.init(params) for tx in self.transforms]
        self.steps = [
            jax.jit(measure.updating(tx, s, mesh, "data"))
            for tx, s in zip(self.transforms, states, strict=True)
        ]
        self.whole = jax.jit(lambda s: s, out_shardings=NamedSharding(mesh, P()))
        self.states = [self._placed(s) for s in states]
        zeros = [{k: np.zeros(s) for k, s in SHAPES.items()} for _ in CODES]
        # f64: the gradients' means minus what came out, and the size of the values added up.
        self.owed = zeros
        self.size = 0.0
        self.gathered: Any = None

    def _placed(self, state: Any) -> Any:
        return jax.device_put(state, cgx_jax.state_shardings(state, "data", self.mesh))

    def step(self, numbers: tuple[int, ...], step: int) -> tuple[int, list[np.ndarray]]:
        """Updates with the code whose turn it is; returns its number and the mean that came out."""
        number = self.turn % len(CODES)
        grads = {
            k: np.random.default_rng([*numbers, step, i]).standard_normal(
                (self.world, *shape), np.float32
            )
            for i, (k, shape) in enumerate(SHAPES.items())
        }
        sharding = NamedSharding(self.mesh, P("data"))
        rank = jax.process_index()
        placed = {
            k: jax.make_array_from_process_local_data(sharding, g[rank : rank + 1])
            for k, g in grads.items()
        }
        mean, self.states[number] = self.steps[number](placed, self.states[number])
        got = {k: np.asarray(y.addressable_data(0)) for k, y in mean.items()}
        for k, g in grads.items():
            self.owed[number][k] += g.astype(np.float64).mean(0) - got[k]
            self.size += float(np.abs(got[k]).max())
        self.turn += 1
        return number, list(got.values())

    @property
    def due(self) -> bool:
        return self.turn % SAVE_EVERY == 0

    def settle(self) -> float:
        """Returns the account's largest imbalance, divided by what rounding may lose.

        All ranks must call it. Afterwards `save` writes what it has gathered.
        """
        whole = self.whole(self.states)
        self.gathered = jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), whole)
        worst = 0.0
        for state, owed in zip(self.gathered, self.owed, strict=True):
            (memory,) = state.memory
            for k, rows in memory.items():
                off = np.abs(owed[k] - rows.mean(0, dtype=np.float64))
                worst = max(worst, float(off.max()))
        return worst / ((1 + self.size) * 2.0**-22)

    def save(self, path: Path) -> None:
        """Writes states and account as `settle` found them; the file is whole or not there."""
        arrays = [*jax.tree.leaves(self.gathered), *jax.tree.leaves(self.owed)]
        partial = path.with_suffix(".partial.npz")
        np.savez(partial, *arrays, turn=self.turn, size=self.size)
        partial.replace(path)

    def restore(self, path: Path) -> None:
        """Continues with what `save` wrote, possibly on another number of ranks."""
        with np.load(path) as file:
            arrays = [file[f"arr_{i}"] for i in range(len(file.files) - 2)]
            self.turn, self.size = int(file["turn"]), float(file["size"])
        leaves, treedef = jax.tree.flatten(self.states)
        old = jax.tree.unflatten(treedef, arrays[: len(leaves)])
        self.states = [self._placed(cgx_jax.resize_state(s, self.world)) for s in old]
        self.owed = jax.tree.unflatten(jax.tree.structure(self.owed), arrays[len(leaves) :])
