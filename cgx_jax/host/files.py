"""Writes files whole or not at all."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path


def write(path: str | os.PathLike[str], text: str) -> None:
    """Puts `text` in the place of a file; if that fails, as on a full disk, the file stays.

    What is no regular file, such as /dev/stdout, is written to. Raises OSError.
    """
    file = Path(path).resolve()
    if file.exists() and not file.is_file():
        file.write_text(text, encoding="utf-8")
        return
    whole = file.with_name(f"{file.name}.{uuid.uuid4().hex}.tmp")
    try:
        with whole.open("x", encoding="utf-8") as out:
            out.write(text)
        whole.replace(file)
    except BaseException:
        with contextlib.suppress(OSError):
            whole.unlink()
        raise
