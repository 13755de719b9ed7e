"""The log of an adaptive training, for `python -m cgx_jax report`: a line of JSON an entry."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax

SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class RunLog:
    """Appends entries to the file `path`, on process 0; without a path it does nothing."""

    path: Path | None

    def write(self, kind: str, **fields: Any) -> None:
        """One entry; `fields` are of JSON types."""
        if self.path is None or jax.process_index() != 0:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as lines:
            lines.write(json.dumps({"kind": kind, **fields}) + "\n")
