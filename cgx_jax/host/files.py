"""Writes files whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from pathlib import Path

_NOT_REPLACED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY)


def write(path: str | os.PathLike[str], text: str) -> None:
    """Puts `text` in the place of a file; if that fails, as on a full disk, the file stays.

    What is no regular file, such as /dev/stdout, is written to, and so is a file that cannot be
    replaced: a mount, or one in a folder that this user cannot write in. Raises OSError.
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
    except BaseException as error:
        with contextlib.suppress(OSError):
            whole.unlink()
        if not there or getattr(error, "errno", None) not in _NOT_REPLACED:
            raise
        file.write_text(text, encoding="utf-8")
