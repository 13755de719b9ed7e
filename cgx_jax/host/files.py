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
    there = Path(path).exists()
    if there and not Path(path).is_file():
        Path(path).write_text(text, encoding="utf-8")
        return
    file = Path(path).resolve()
    whole = file.with_name(f"{uuid.uuid4().hex}.tmp")
    try:
        with whole.open("x", encoding="utf-8") as out:
            out.write(text)
        if there:
            whole.chmod(file.stat().st_mode & 0o7777)
        whole.replace(file)
    except BaseException:
        with contextlib.suppress(OSError):
            whole.unlink()
        raise
