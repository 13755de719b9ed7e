"""Which options an adaptive policy refuses when it is made."""

from __future__ import annotations

from typing import Any

import numpy as np

from cgx_jax.compressors import Compressor


def check_options(policy: Any) -> None:
    """Raises ValueError for invalid options of an `Adaptive` policy."""
    for name in ("warmup", "every", "sample_every", "max_plans"):
        value = getattr(policy, name)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"Adaptive: {name}={value!r} must be an integer of 1 or more.")
    runs, candidates = policy.sampler.runs, policy.sampler.candidates
    if not isinstance(runs, int) or runs < 1:
        raise ValueError(f"Adaptive: runs={runs!r} must be an integer of 1 or more.")
    if not 0 < policy.decay <= 1:
        raise ValueError(f"Adaptive: decay={policy.decay} is outside (0, 1]; 0.9 is usual.")
    if not 0 <= policy.hysteresis < 1:
        raise ValueError(f"Adaptive: hysteresis={policy.hysteresis} is outside [0, 1).")
    widths = [c.width for c in candidates if isinstance(c, Compressor)]
    distinct = len(widths) == len(set(candidates)) == len(candidates)
    if not widths or not distinct or widths != sorted(widths):
        raise ValueError(
            f"Adaptive: candidates={[str(c) for c in candidates]} must be Quantize(...) or other "
            "compressors, all different and sorted by ascending bits (Compressor.width)."
        )
    policy.solver.check(np.array(widths))
