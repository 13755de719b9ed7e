"""The platforms that have native kernels, one row each; every other platform runs plain jnp."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from jax.extend.core import Primitive
from jax.interpreters import mlir

from cgx_jax.kernels import native
from cgx_jax.kernels.constants import LONGEST_IN_UNITS

Lowering = Callable[..., Any]


class Platform(NamedTuple):
    """A platform of JAX: its `module` of kernels, or None where that is not installed.

    Its codec multiplies the values of buckets of up to `longest_in_units` by units. `missing`, if
    any, is called when a program is compiled without the kernels.
    """

    module: Callable[[], ModuleType | None]
    longest_in_units: float
    missing: Callable[[], None] | None = None

    def has(self, target: str) -> bool:
        """Whether there is a native call of this name."""
        module = self.module()
        return module is not None and target in module.handlers()


PLATFORMS = {
    "cpu": Platform(native.module, math.inf),
    "cuda": Platform(native.cuda_module, LONGEST_IN_UNITS, native.warn_of_missing_cuda),
}


def register(
    primitive: Primitive, plain: Lowering, rule: Callable[[str, Platform], Lowering]
) -> None:
    """Registers the lowering `plain`, and rule(name, platform) where a platform has kernels."""
    mlir.register_lowering(primitive, plain)
    for name, platform in PLATFORMS.items():
        if platform.module() is not None:
            mlir.register_lowering(primitive, rule(name, platform), platform=name)
        elif platform.missing is not None:
            mlir.register_lowering(primitive, _telling(plain, platform.missing), platform=name)


def _telling(plain: Lowering, missing: Callable[[], None]) -> Lowering:
    def lowering(ctx: mlir.LoweringRuleContext, *operands: Any, **params: Any) -> Any:
        missing()
        return plain(ctx, *operands, **params)

    return lowering
