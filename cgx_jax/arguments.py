"""Checks of arguments that many calls share."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cgx_jax._types import Key


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


def store_whole(config: Any, name: str, low: int | None = None, high: int | None = None) -> int:
    """Stores field `name` of a frozen dataclass as an int and returns it; see `whole_number`."""
    number = whole_number(type(config).__name__, name, getattr(config, name), low, high)
    object.__setattr__(config, name, number)
    return number


def check_key(caller: str, key: Key) -> None:
    """Raises TypeError unless `key` is None or one key, typed or of raw data."""
    dtype: Any = getattr(key, "dtype", bool)
    typed = jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if typed and np.ndim(key):
        raise TypeError(
            f"{caller}: key is {dtype}{list(np.shape(key))}, which are several keys; pass one."
        )
    raw = dtype == np.uint32 and np.ndim(key) == 1
    # A new function each time: JAX would keep the shape of an earlier default generator.
    default = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0))).shape if raw else ()
    if raw and np.shape(key) != default:
        raise TypeError(
            f"{caller}: key is uint32{list(np.shape(key))}, but raw keys of the default generator "
            f"are uint32{list(default)}; pass jax.random.wrap_key_data(key, impl=...)."
        )
    if key is not None and not raw and not typed:
        raise TypeError(f"{caller}: key={key!r} is no key; pass key=jax.random.key(n).")


def folded(caller: str, key: Key, number: int | jax.Array) -> Key:
    """Returns the key of part `number` of a call; None if the call has no key."""
    check_key(caller, key)
    return None if key is None else jax.random.fold_in(key, number)
