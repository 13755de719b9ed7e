"""The log of an adaptive training, for `python -m cgx_jax report`: one line of JSON per entry."""

from __future__ import annotations

import errno
import json
import os
import warnings
from pathlib import Path
from typing import Any

import jax

from cgx_jax.policies.menu import Menu

SCHEMA = 2


class RunLog:
    """Appends entries to the file `path`, on process 0; without a path it does nothing.

    A file that cannot be written, for example on a full disk, does not end a training: it causes
    one RuntimeWarning, and entries that cannot be written are left out.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._warned = False

    def run(self, menu: Menu) -> None:
        """Writes the first entry of a run: its leaves and what they may take."""
        candidates = [c._asdict() for c in menu.candidates]
        paths, sizes = menu.paths, menu.sizes
        self.write("run", schema=SCHEMA, paths=paths, sizes=sizes, candidates=candidates)

    def write(self, kind: str, **fields: Any) -> None:
        """Writes one entry; `fields` are of JSON types."""
        if self.path is None or jax.process_index() != 0:
            return
        line = json.dumps({"kind": kind, **fields}) + "\n"
        try:
            self._append(line.encode())
        except OSError as error:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"Adaptive: log={str(self.path)!r} cannot be written ({error}). Training goes "
                    "on, but entries are lost until the file can be written; free disk space, or "
                    "restart with another log=.",
                    RuntimeWarning,
                    stacklevel=3,
                )

    def _append(self, line: bytes) -> None:
        assert self.path is not None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab", buffering=0) as file:
            before = file.tell()
            written = file.write(line)
            if written != len(line):  # half an entry would make the file unreadable
                file.truncate(before)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
