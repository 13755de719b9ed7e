"""Reads JSON from untrusted sources: the files of profiles and the logs of runs.

Readers turn any text either into checked values or into a ValueError with the reason. Nothing that
could control a terminal or exhaust the machine gets past them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

MOST_CHARACTERS = 16 << 20  # of one JSON text, a file or a line
MOST_LINES = 10_000_000
MOST_DEPTH = 16
MOST_TEXT = 4096  # characters of one string
MOST_SIZE = 1 << 50  # values or bytes


def loads(text: str) -> Any:
    """Returns the value of a JSON text; raises ValueError with the reason for any other text.

    Objects and arrays nest at most 16 deep. Strings have at most 4,096 characters, all printable.
    Integers fit in 64 bits.
    """
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"it has more than {MOST_CHARACTERS} characters")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"it nests deeper than {MOST_DEPTH} levels") from None
    except ValueError as error:
        raise ValueError(f"it is not JSON ({error})") from None
    _check(value)
    return value


def read(path: Path) -> str:
    """Returns the text of a file; raises ValueError if it is not UTF-8 or too long for `loads`."""
    with path.open(encoding="utf-8") as file:
        return _text(file.read, "it")


def lines(path: Path) -> Iterator[str]:
    """Yields the lines of a file; raises ValueError, with file and line, as `read` does."""
    with path.open(encoding="utf-8") as file:
        for number in range(1, MOST_LINES + 1):
            line = _text(file.readline, f"line {number} of {path}")
            if not line:
                return
            yield line
    raise ValueError(f"{path} has more than {MOST_LINES} lines")


def _text(read: Callable[[int], str], what: str) -> str:
    try:
        text = read(MOST_CHARACTERS + 1)
    except UnicodeDecodeError:
        raise ValueError(f"{what} is not UTF-8 text") from None
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"{what} has more than {MOST_CHARACTERS} characters")
    return text


def _check(value: Any) -> None:
    level = [value]
    for _ in range(MOST_DEPTH + 1):
        below: list[Any] = []
        for x in level:
            if isinstance(x, str):
                check_text(x)
            elif isinstance(x, int) and abs(x) >= 1 << 63:
                raise ValueError("it holds an integer of more than 64 bits")
            elif isinstance(x, list):
                below += x
            elif isinstance(x, dict):
                below += [*x.keys(), *x.values()]
        if not (level := below):
            return
    raise ValueError(f"it nests deeper than {MOST_DEPTH} levels")


def check_text(text: str, most: int = MOST_TEXT) -> None:
    """Raises ValueError for a text that is too long or has characters that are not printable."""
    if len(text) > most:
        raise ValueError(f"a text has {len(text)} characters, more than {most}")
    bad = next((c for c in text if not c.isprintable()), None)
    if bad is not None:
        raise ValueError(f"the text {text[:60]!a} holds {bad!a}, which is not printable")


def whole(value: Any, what: str, least: int = 0, most: int = MOST_SIZE) -> int:
    """Returns `value` if it is an integer in [least, most]; else ValueError, which names `what`."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{what}={shown(value)} is not a whole number in [{least}, {most}]")
    return value


def number(value: Any, what: str) -> float:
    """Returns `value` if it is a number (also NaN or an infinity); raises ValueError otherwise."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ValueError(f"{what}={shown(value)} is not a number")
    return float(value)


def positive(value: Any, what: str) -> float:
    """Returns `value` if it is a finite number above 0; raises ValueError otherwise."""
    if not (number(value, what) > 0 and math.isfinite(value)):
        raise ValueError(f"{what}={shown(value)} is not a positive number")
    return float(value)


def text(value: Any, what: str) -> str:
    """Returns `value` if it is a string; raises ValueError otherwise."""
    if not isinstance(value, str):
        raise ValueError(f"{what}={shown(value)} is not text")
    return value


def items(value: Any, what: str, count: int | None = None) -> Sequence[Any]:
    """Returns `value` if it is a list (of `count` items, if given); raises ValueError otherwise."""
    if not isinstance(value, list) or count not in (None, len(value)):
        of = "" if count is None else f" of {count}"
        raise ValueError(f"{what}={shown(value)} is not a list{of}")
    return value


def field(entry: Any, name: str) -> Any:
    """Returns field `name` of the object `entry`; raises ValueError if it is missing."""
    if not isinstance(entry, dict) or name not in entry:
        raise ValueError(f"{name} is missing in {shown(entry)}")
    return entry[name]


def shown(value: Any) -> str:
    """Formats a value for an error message, cut to 60 characters."""
    full = ascii(value)
    return full if len(full) <= 60 else f"{full[:57]}..."
