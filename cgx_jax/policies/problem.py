"""What a solver is given: numbers that describe the leaves and their candidates."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """What a solver is given: the numbers by which it chooses a candidate for every leaf.

    * `values`, int64[leaves]: how many values a leaf has.
    * `norm`, float64[leaves]: the L2 norm of its gradient.
    * `bits`, int64[candidates]: the candidates' widths (`Compressor.width`), ascending. Several
      candidates may share a width, and 32 stands for an exact leaf.
    * `nbytes`, int64[leaves, candidates]: the bytes of the payload with its metadata.
    * `error`, float64[leaves, candidates]: the squared L2 error.
    * `noisy` and `rotated`, bool[candidates]: which candidates round at random and which rotate,
      since both take time. By default none does.
    * `change`: the share by which the norm of all gradients differs from the norm at the last look;
      None at the first look.

    Anything that converts to these is accepted. Raises ValueError for shapes that disagree and for
    numbers that are negative or not finite.
    """

    values: np.ndarray
    norm: np.ndarray
    bits: np.ndarray
    nbytes: np.ndarray
    error: np.ndarray
    noisy: Any = False
    rotated: Any = False
    change: float | None = None

    def __post_init__(self) -> None:
        leaves, candidates = np.size(self.values), np.size(self.bits)
        for name in ("noisy", "rotated"):
            kind = np.asarray(getattr(self, name), bool)
            if kind.shape not in ((), (candidates,)):
                raise ValueError(
                    f"Problem: {name} has the shape {list(kind.shape)}; give each of the "
                    f"{candidates} candidates one bool, or one for all."
                )
            object.__setattr__(self, name, np.broadcast_to(kind, (candidates,)))
        shapes = {
            "values": (leaves,),
            "norm": (leaves,),
            "bits": (candidates,),
            "nbytes": (leaves, candidates),
            "error": (leaves, candidates),
        }
        for name, shape in shapes.items():
            given = np.asarray(getattr(self, name))
            if given.shape != shape:
                raise ValueError(
                    f"Problem: {name} has the shape {list(given.shape)}, but {leaves} values and "
                    f"{candidates} bits need {list(shape)}; pass numbers of that shape."
                )
            whole = name not in ("norm", "error")
            if whole and given.size and given.dtype.kind not in "iu":
                raise ValueError(
                    f"Problem: {name} is {given.dtype}, but counts must be whole; pass integers."
                )
            wrong = np.argwhere(~(np.isfinite(given) & (given >= 0)))
            if wrong.size:
                place = tuple(wrong[0].tolist())
                raise ValueError(
                    f"Problem: {name}{list(place)}={given[place]} must be finite and at least 0; "
                    "leave that leaf or step out of the statistics."
                )
            object.__setattr__(self, name, given.astype(np.int64 if whole else np.float64))
        if self.change is not None and not 0 <= self.change < np.inf:
            raise ValueError(
                f"Problem: change={self.change} must be finite and at least 0; pass None where no "
                "earlier norm is known."
            )
        if not candidates or self.bits[0] < 1 or (np.diff(self.bits) < 0).any():
            raise ValueError(
                f"Problem: bits={self.bits.tolist()} must be widths of 1 or more, ascending; sort "
                "the candidates by width."
            )
