"""The cache of settings from earlier runs: one folder per topology, one file per tree."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, TypeVar

from cgx_jax import untrusted

SCHEMA = 1
NEAR = 4.0  # trees whose bytes differ by at most this factor may share a first setting
MOST_FILES = 1000  # that are read per topology

Chosen = TypeVar("Chosen", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class Key:
    """The job that a setting is for: `topology`, in JSON types, and a tree by digest and bytes."""

    topology: dict[str, Any]
    tree: str
    nbytes: int

    @property
    def folder(self) -> str:
        """The name of the topology's folder."""
        return digest(self.topology)


def user_folder() -> Path:
    """Returns this package's folder in the user's cache folder, by the system's conventions."""
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData" / "Local") / "cgx_jax" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "cgx_jax"
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification ignores a relative path.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "cgx_jax"


def folder(cache: str | os.PathLike[str] | bool) -> Path | None:
    """Returns the folder that `cache=` asks for: the user's for True, None for False.

    If the user has no home folder, it returns None and raises one RuntimeWarning.
    """
    if cache is not True:
        return Path(cache) if cache else None
    try:
        return user_folder()
    except RuntimeError as error:
        warnings.warn(
            f"Tuner: there is no folder for caches ({error}), so the next run measures again; "
            "pass cache= with a folder that can be written, or False.",
            RuntimeWarning,
            stacklevel=3,
        )
        return None


def digest(value: Any) -> str:
    """Returns 32 hexadecimal digits that identify a value in JSON types."""
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def find(root: Path, key: Key, parse: Callable[[Any], Chosen]) -> tuple[Chosen | None, bool]:
    """Returns (this tree's setting, True), or (a similar tree's setting or None, False).

    The similar tree is the one whose bytes are nearest. `parse` converts a setting's JSON to the
    setting, or raises ValueError. Files that are damaged or belong to another topology are skipped,
    with one RuntimeWarning.
    """
    folder = root / key.folder
    own = folder / f"{key.tree}.json"
    away: dict[Chosen, float] = {}
    bad: list[str] = []
    with contextlib.suppress(OSError):  # without the folder there is nothing to find
        paths = [own, *(p for p in sorted(folder.glob("*.json")) if p != own)]
        for path in paths[:MOST_FILES]:
            try:
                nbytes, setting = _read(path, key, parse)
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                bad.append(f"{path}: {error}")
                continue
            if path == own:
                return setting, True
            apart = abs(math.log(nbytes / max(key.nbytes, 1)))
            away[setting] = min(apart, away.get(setting, apart))
    if bad:
        warnings.warn(
            f"Tuner: {bad[0]}; {len(bad)} of the cache's files are skipped, and their jobs are "
            "measured again. Delete the files to stop this warning.",
            RuntimeWarning,
            stacklevel=2,
        )
    nearest = min(away, key=lambda setting: away[setting], default=None)
    return (nearest if nearest is not None and away[nearest] <= math.log(NEAR) else None), False


def _read(path: Path, key: Key, parse: Callable[[Any], Chosen]) -> tuple[int, Chosen]:
    """Returns the bytes of a file's tree, and its setting."""
    fields = untrusted.loads(untrusted.read(path))
    schema = untrusted.field(fields, "schema")
    if schema != SCHEMA:
        raise ValueError(
            f"schema={untrusted.shown(schema)}, this version of cgx_jax reads {SCHEMA}"
        )
    topology = untrusted.field(fields, "topology")
    if topology != key.topology:
        raise ValueError("it belongs to other machines, versions or options than its folder")
    if untrusted.field(fields, "tree") != path.stem:
        raise ValueError("it belongs to another tree than its name says")
    nbytes = untrusted.whole(untrusted.field(fields, "nbytes"), "nbytes", 1)
    return nbytes, parse(untrusted.field(fields, "setting"))


def keep(root: Path, key: Key, setting: dict[str, Any]) -> None:
    """Writes a setting's file as a whole; raises one RuntimeWarning if that fails."""
    fields = {"schema": SCHEMA, "topology": key.topology, "tree": key.tree}
    fields |= {"nbytes": max(key.nbytes, 1), "setting": setting}
    folder = root / key.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _replace(folder / f"{key.tree}.json", json.dumps(fields, indent=1) + "\n")
    except OSError as error:
        warnings.warn(
            f"Tuner: the setting cannot be written to {str(folder)!r} ({error}), so the next run "
            "measures again; pass cache= with a folder that can be written, or False.",
            RuntimeWarning,
            stacklevel=2,
        )


def _replace(path: Path, text: str) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
