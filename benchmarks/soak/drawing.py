"""What the soak reduces: drawn leaves, compressors and reductions, their values and their bounds.

All of it follows from numbers that every rank knows, so any rank can compute what all others hold.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

from cases import FLOATS, LOSSY, PAIRS
from cgx_jax import Identity, Plan
from cgx_jax.reductions.named import named
from extremes import KINDS, allowed, array

SHAPES = [(5,), (129,), (33, 7), (1000,), (64, 64), (3, 50, 40), (40, 250), (25_000,)]
# Gradients are mostly of these kinds; one array in four may be of any kind.
USUAL = ["normal", "decades"]


@dataclasses.dataclass(frozen=True)
class Draw:
    """A call: leaves with a compressor each, and how they are reduced."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    compressors: tuple[Any, ...]
    reduction: str | None
    mean: bool

    def __str__(self) -> str:
        leaves = zip(self.dtypes, self.shapes, self.compressors, strict=True)
        text = ", ".join(f"{d}{list(s)} {c}" for d, s, c in leaves)
        return f"{'pmean' if self.mean else 'psum'} of {text} by {self.reduction or 'default'}"

    def like(self) -> list[jax.ShapeDtypeStruct]:
        pairs = zip(self.shapes, self.dtypes, strict=True)
        return [jax.ShapeDtypeStruct(s, jnp.dtype(d)) for s, d in pairs]

    def plan(self) -> Plan:
        codes = {str(i): c for i, c in enumerate(self.compressors)}
        return Plan.build(self.like(), Identity(), overrides=codes)

    def values(self, rank: int, *numbers: int) -> list[np.ndarray]:
        """Returns what `rank` holds in the step that `numbers` identify."""
        out = []
        for i, leaf in enumerate(self.like()):
            rng = np.random.default_rng([*numbers, i])
            kind = rng.choice(USUAL if rng.random() < 0.75 else list(KINDS))
            seed = [*numbers, i, rank]
            out.append(array(kind, seed, int(rng.integers(-9, 9)), leaf.shape, leaf.dtype))
        return out

    def bounds(self, x: list[jax.Array]) -> list[jax.Array]:
        """Returns the stated bound of every leaf's error, from all ranks' values; for jit."""
        out = []
        for c, rows in zip(self.compressors, x, strict=True):
            if c.lossless:  # added up in the leaf's own dtype
                eps = float(jnp.finfo(rows.dtype).eps)
                sizes = jnp.abs(rows.astype(jnp.float32)).sum(0)
                fits = sizes < float(jnp.finfo(rows.dtype).max)
                out.append(jnp.where(fits, len(rows) * eps * sizes, jnp.inf))
            else:
                how = named("soak", self.reduction or c.reductions[0])
                divisor = len(rows) if self.mean else 1
                out.append(how.error_bound(c, rows.astype(jnp.float32), divisor))
        return out

    def share_of_bound(
        self, got: list[np.ndarray], x: list[np.ndarray], bounds: list[np.ndarray]
    ) -> float:
        """Returns the largest error divided by the allowed error; more than 1 is a defect."""
        share = 0.0
        for y, rows, bound in zip(got, x, bounds, strict=True):
            divisor = len(rows) if self.mean else 1
            most = allowed(rows, bound, divisor)
            with np.errstate(all="ignore"):
                off = np.abs(y.astype(np.float64) - rows.astype(np.float64).sum(0) / divisor)
                here = np.where(np.isfinite(most), off / most, 0)
            share = max(share, float(np.nan_to_num(here, nan=np.inf).max(initial=0)))
        return share


def _fits(compressor: Any, shape: tuple[int, ...]) -> bool:
    """Whether the leaf has as many values as a sparse code keeps."""
    keep = getattr(compressor, "keep", 0)
    return not isinstance(keep, int) or keep <= int(np.prod(shape))


def draw(rng: np.random.Generator, can: frozenset[str], *, new_shape: bool = False) -> Draw:
    """Draws a call that an exchange with the abilities `can` is able to run.

    With `new_shape` the call has one leaf, of a random shape.
    """
    stateless = {n for n, case in LOSSY.items() if not case.stateful and "toy" not in n}
    able = [
        (c, how)
        for name, (c, how) in PAIRS.items()
        if name.rpartition(", ")[0] in stateless and named("soak", how).needs <= can
    ]
    firsts = [c for c, how in able if how == c.reductions[0]] + [Identity()]
    alone = new_shape or rng.random() < 0.6
    shapes, compressors, reduction = [], [], None
    for _ in range(1 if alone else rng.integers(2, 6)):
        if alone:
            compressor, reduction = able[rng.integers(len(able))]
        else:
            compressor = firsts[rng.integers(len(firsts))]
        shape = (int(rng.integers(64, 25_000)),) if new_shape else ()
        while not shape or not _fits(compressor, shape):
            shape = SHAPES[rng.integers(len(SHAPES))]
        shapes.append(shape)
        compressors.append(compressor)
    dtypes = tuple(str(rng.choice(FLOATS)) for _ in shapes)
    return Draw(tuple(shapes), dtypes, tuple(compressors), reduction, bool(rng.random() < 0.5))


def exact(rng: np.random.Generator) -> Draw:
    """Draws a `lax.psum` of a random shape, which shows what JAX itself keeps of programs."""
    shape = (int(rng.integers(64, 25_000)),)
    return Draw((shape,), ("float32",), (Identity(),), None, False)
