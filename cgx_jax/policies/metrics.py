"""What an adaptive policy tells a logger."""

from __future__ import annotations

from collections.abc import Sequence

from cgx_jax.policies.checkpoint import Progress
from cgx_jax.policies.decide import Subject


def of(
    progress: Progress,
    subject: Subject,
    wire_bytes: int | None,
    compile_seconds: Sequence[float],
) -> dict[str, float | str]:
    """Returns `Adaptive.metrics`; `wire_bytes` are what a rank sends, None if not known."""
    history = progress.history
    last = history[-1] if history else None
    each = subject.nbytes(progress.current)
    out: dict[str, float | str] = {
        "cgx/bytes": sum(each),
        "cgx/bits_per_value": 8 * sum(each) / max(1, sum(x.size for x in subject.leaves)),
        "cgx/plan_changes": sum(r.outcome == "changed" for r in history),
        "cgx/plans": len(progress.plans),
        "cgx/compile_seconds": sum(compile_seconds),
        "cgx/nonfinite_leaves": len(last.nonfinite) if last else 0,
        "cgx/refresh": last.outcome if last else "warmup",
    }
    if wire_bytes is not None:
        out["cgx/wire_bytes"] = wire_bytes
    for i, (path, compressor) in enumerate(zip(subject.paths, progress.current, strict=True)):
        out[f"cgx/bits/{path}"] = compressor.width
        out[f"cgx/bytes/{path}"] = each[i]
        if last:
            out[f"cgx/relative_error/{path}"] = last.relative[i]
    if last and last.unusable:
        out["cgx/unusable"] = ", ".join(last.unusable)
    if last and last.nonfinite:
        out["cgx/nonfinite"] = ", ".join(last.nonfinite)
    return out
