"""The leaves and their candidates in numbers: all that solvers and reports need to know."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cgx_jax.compressors import Compressor
from cgx_jax.leaves import Leaf
from cgx_jax.policies.problem import Problem


class Candidate(NamedTuple):
    """A compressor: its name for people, `width`, `codec_work`, and payload bytes of each leaf."""

    name: str
    bits: int
    work: tuple[str, ...]
    nbytes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Menu:
    """The leaves that are adapted, by path and number of values, and what each may take."""

    paths: tuple[str, ...]
    sizes: tuple[int, ...]
    candidates: tuple[Candidate, ...]

    @classmethod
    def of(cls, leaves: Sequence[Leaf], compressors: Sequence[Compressor]) -> Menu:
        """The menu of `compressors`, each for all `leaves`."""
        candidates = [
            Candidate(
                short_name(c),
                c.width,
                tuple(sorted(c.codec_work)),
                tuple(c.payload_bytes(x.shape, x.dtype) for x in leaves),
            )
            for c in compressors
        ]
        paths, sizes = tuple(x.path for x in leaves), tuple(x.size for x in leaves)
        return cls(paths, sizes, tuple(candidates))

    def problem(self, averages: dict[str, Any]) -> Problem:
        """Returns the solver's problem; `averages` are those of `statistics.mean`."""
        nbytes = np.array([c.nbytes for c in self.candidates], np.int64)
        return Problem(
            values=np.array(self.sizes, np.int64),
            norm=np.sqrt(averages["square"]),
            bits=np.array([c.bits for c in self.candidates]),
            nbytes=nbytes.reshape(len(self.candidates), len(self.sizes)).T,
            error=averages["error"],
            noisy=["noise" in c.work for c in self.candidates],
            rotated=["rotation" in c.work for c in self.candidates],
        )

    def cost(
        self, choice: Sequence[int] | np.ndarray, averages: dict[str, Any]
    ) -> tuple[int, float]:
        """Returns payload bytes and squared error of all leaves under the chosen candidates."""
        nbytes = sum(self.candidates[c].nbytes[i] for i, c in enumerate(choice))
        return nbytes, math.fsum(averages["error"][i][c] for i, c in enumerate(choice))


def short_name(compressor: Compressor) -> str:
    """Writes a compressor as code: its first option, and others that are not the default."""
    options: Sequence[Any] = dataclasses.fields(compressor)  # type: ignore[arg-type]
    shown = [
        f"{f.name}={getattr(compressor, f.name)}"
        for i, f in enumerate(options)
        if i == 0 or getattr(compressor, f.name) != f.default
    ]
    return f"{type(compressor).__name__}({', '.join(shown)})"
