"""The cache of settings from earlier runs: one folder per topology, one file per tree."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from cgx_jax.host import agreement, files, untrusted

SCHEMA = 1

Chosen = TypeVar("Chosen")


@dataclasses.dataclass(frozen=True)
class Key:
    """The job that a setting is for: `topology`, in JSON types, and the digest of a tree."""

    topology: dict[str, Any]
    tree: str

    @property
    def folder(self) -> str:
        """The name of the topology's folder."""
        return digest(self.topology)


class _File(NamedTuple):
    schema: int
    topology: dict[str, Any]
    tree: str
    setting: Any


def user_folder(platform: str, variables: Mapping[str, str], home: Path) -> Path:
    """Returns this package's folder in the user's cache folder, by the system's conventions."""
    if platform == "win32":
        local = variables.get("LOCALAPPDATA")
        return (Path(local) if local else home / "AppData" / "Local") / "cgx_jax" / "Cache"
    if platform == "darwin":
        return home / "Library" / "Caches" / "cgx_jax"
    base = variables.get("XDG_CACHE_HOME", "")
    # The specification ignores a relative path.
    return (Path(base) if os.path.isabs(base) else home / ".cache") / "cgx_jax"


def folder(cache: str | os.PathLike[str] | bool) -> Path | None:
    """Returns the folder that `cache=` asks for: the user's for True, None for False.

    If the user has no home folder, it returns None and raises one RuntimeWarning.
    """
    if cache is not True:
        return Path(cache) if cache else None
    try:
        return user_folder(sys.platform, os.environ, Path.home())
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
    text = agreement.without_addresses(json.dumps(value, sort_keys=True))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def find(root: Path, key: Key, parse: Callable[[Any], Chosen]) -> Chosen | None:
    """Returns the setting of an earlier run of this job, or None.

    `parse` converts a setting's JSON to the setting, or raises ValueError. A file that is damaged
    or belongs to another job is not used, and raises one RuntimeWarning.
    """
    path = root / key.folder / f"{key.tree}.json"
    try:
        fields = untrusted.loads(untrusted.read(path))
        untrusted.check_version(fields, "schema", SCHEMA)
        kept: _File = untrusted.typed(fields, _File, "it")
        if kept.topology != key.topology:
            raise ValueError("it belongs to other machines, versions or options than its folder")
        if kept.tree != key.tree:
            raise ValueError("it belongs to another tree than its name says")
        return parse(kept.setting)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        warnings.warn(
            f"Tuner: {path}: {error}; the file is not used, and the job is measured again.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def keep(root: Path, key: Key, setting: dict[str, Any]) -> None:
    """Writes a setting's file as a whole; raises one RuntimeWarning if that fails."""
    fields = {"schema": SCHEMA, "topology": key.topology, "tree": key.tree, "setting": setting}
    folder = root / key.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        files.write(folder / f"{key.tree}.json", json.dumps(fields, indent=1) + "\n")
    except (OSError, ValueError) as error:
        warnings.warn(
            f"Tuner: the setting cannot be written to {str(folder)!r} ({error}), so the next run "
            "measures again; pass cache= with a folder that can be written, or False.",
            RuntimeWarning,
            stacklevel=2,
        )
