"""Gives BatchNorm the statistics of the whole batch, as under plain jit."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


def give_axis(module: Any, axis: Any) -> None:
    """Sets `axis_name` of NNX BatchNorms without one in `module`, the loss's own copy."""
    nnx: Any = sys.modules["flax.nnx"]
    for _, node in nnx.iter_graph(module):
        if isinstance(node, nnx.BatchNorm) and node.axis_name is None:
            node.axis_name = axis


@contextlib.contextmanager
def linen_axis(axis: Any) -> Iterator[None]:
    """Gives `axis_name` to Linen's BatchNorm modules in this context, if Linen is in use."""
    linen: Any = sys.modules.get("flax.linen")
    if linen is None:
        yield
        return

    def intercept(function: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module = context.module
        if not isinstance(module, linen.BatchNorm) or module.axis_name is not None:
            return function(*args, **kwargs)
        object.__setattr__(module, "axis_name", axis)  # modules are frozen
        try:
            return function(*args, **kwargs)
        finally:
            object.__setattr__(module, "axis_name", None)

    with linen.intercept_methods(intercept):
        yield
