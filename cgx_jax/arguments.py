"""Checks of arguments that many calls share."""

from __future__ import annotations

import operator
from typing import Any


def whole_number(
    caller: str, name: str, value: Any, low: int | None = None, high: int | None = None
) -> int:
    """Returns `value` as an int; raises TypeError if it is not, ValueError outside low..high."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{caller}: {name}={value!r} is not an integer; pass a Python int."
        ) from None
    if (low is not None and number < low) or (high is not None and number > high):
        limit = f"at least {low}" if high is None else f"in {low}..{high}"
        raise ValueError(f"{caller}: {name}={number} must be {limit}.")
    return number
