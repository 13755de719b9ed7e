"""Reads JSON from untrusted sources: profiles, the tuner's cache, the state of a policy.

`typed` turns a value of JSON into a value of a stated type, or into a ValueError that names the
field, the value and what it should be. Limits are on what could exhaust the machine or control a
terminal.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
import reprlib
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

MOST_CHARACTERS = 16 << 20  # of one JSON text
MOST_SIZE = 1 << 50  # values or bytes
_hints = functools.cache(get_type_hints)
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60


def read(path: Path) -> str:
    """Returns the text of a file for `loads`, which refuses it if it is too long or not UTF-8.

    Raises OSError for a pipe or a device, from which reading may never end.
    """
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is no regular file")
    with path.open(encoding="utf-8", errors="surrogateescape") as file:
        return file.read(MOST_CHARACTERS + 1)


def loads(text: str) -> Any:
    """Returns the value of a JSON text; raises ValueError with the reason for any other text."""
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"it has more than {MOST_CHARACTERS} characters")
    try:
        text.encode()
        return json.loads(text, object_pairs_hook=_without_twins)
    except UnicodeEncodeError:
        raise ValueError("it is not UTF-8 text") from None
    except RecursionError:
        raise ValueError("it nests too deep to be read") from None
    except _TwinError:
        raise
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from None


class _TwinError(ValueError):
    pass


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for key, value in pairs:
        if key in fields:
            raise _TwinError(f"an object has {shown(key)} twice")
        fields[key] = value
    return fields


def check_version(fields: Any, name: str, known: int) -> None:
    """Raises ValueError unless `fields` is an object whose field `name` is `known`."""
    if not isinstance(fields, dict):
        raise ValueError(f"{shown(fields)} is not an object")
    if fields.get(name) != known:
        found = shown(fields.get(name))
        raise ValueError(f"{name}={found}, but this version of cgx_jax reads {known}")


def typed(value: Any, kind: Any, what: str) -> Any:
    """Returns `value`, called `what` in errors, as `kind`: a type that may hold other types.

    `kind` is int, float, str, None, Any, a list, tuple or dict of such types, a union of one with
    None, a dataclass or a NamedTuple. Raises ValueError, naming the part that is of another type.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is types.UnionType:
        (other,) = (k for k in inner if k is not type(None))
        return None if value is None else typed(value, other, what)
    if origin in (list, tuple) and isinstance(value, (list, tuple)):
        kinds = inner if origin is tuple and inner[-1] is not ... else [inner[0]] * len(value)
        if len(kinds) == len(value):
            return origin(_each(value, kinds, what))
    elif origin is dict and isinstance(value, dict):
        return {k: typed(x, inner[1], f"{what} {shown(k)}") for k, x in value.items()}
    elif hasattr(kind, "_fields") and isinstance(value, (list, tuple)):
        if len(value) == len(kind._fields):
            return kind(*_each(value, _hints(kind).values(), what))
    elif isinstance(value, dict) and (hasattr(kind, "_fields") or dataclasses.is_dataclass(kind)):
        check_names(value, kind, what)
        hints = _hints(kind)
        return kind(**{k: typed(x, hints[k], f"{what} {k}") for k, x in value.items()})
    elif kind in (int, float) and isinstance(value, kind | int) and not isinstance(value, bool):
        if isinstance(value, float) or abs(value) < 1 << 63:
            return value
    elif kind is str and isinstance(value, str):
        return value
    name = str(kind) if inner else kind.__name__
    if hasattr(kind, "_fields") or dataclasses.is_dataclass(kind):
        name = f"an object with the fields {list(_hints(kind))}"
    raise ValueError(f"{what}={shown(value)} is not {name}")


def _each(values: Iterable[Any], kinds: Iterable[Any], what: str) -> Iterator[Any]:
    for i, (value, kind) in enumerate(zip(values, kinds, strict=True)):
        yield typed(value, kind, f"{what}[{i}]")


def check_names(value: dict[str, Any], kind: Any, what: str) -> None:
    """Raises ValueError unless `value` has the fields of `kind`, and no others."""
    known = inspect.signature(kind).parameters
    needed = {name for name, p in known.items() if p.default is p.empty}
    missing, unknown = sorted(needed - value.keys()), sorted(value.keys() - known.keys(), key=str)
    if missing or unknown:
        raise ValueError(f"{what} has fields missing {missing}, unknown {shown(unknown)}")


def check_text(text: str, most: int) -> None:
    """Raises ValueError for a text that is too long or has characters that are not printable."""
    if len(text) > most:
        raise ValueError(f"a text has {len(text)} characters, more than {most}")
    if not text.isprintable():
        raise ValueError(f"the text {shown(text)} is not printable")


def whole(value: Any, what: str, least: int = 0, most: int = MOST_SIZE) -> int:
    """Returns `value` if it is an integer in [least, most]; else ValueError, which names `what`."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{what}={shown(value)} is not a whole number in [{least}, {most}]")
    return value


def positive(value: float, what: str) -> None:
    """Raises ValueError, which names `what`, unless `value` is finite and above 0."""
    if not 0 < value < math.inf:
        raise ValueError(f"{what}={shown(value)} is not a positive number")


def shown(value: Any) -> str:
    """Formats a value for an error message, in at most 60 printable ASCII characters."""
    full = _SHORT.repr(value).encode("ascii", "backslashreplace").decode()
    return full if len(full) <= 60 else f"{full[:57]}..."
