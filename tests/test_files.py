"""Files that are written whole or not at all."""

import errno
import os
from pathlib import Path
from unittest import mock

import pytest

from cgx_jax.host import agreement, files


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):  # fails on the way, as on a full disk
        files.write(path, "new" * 10_000 + "\ud800")
    assert path.read_text() == "old"
    files.write(path, "newer")
    assert path.read_text() == "newer"
    assert [*tmp_path.iterdir()] == [path]


def test_what_a_link_leads_to_is_written_and_the_link_stays(tmp_path):
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    link.symlink_to(real)
    files.write(link, "text")
    assert link.is_symlink()
    assert real.read_text() == "text"


def test_a_file_keeps_its_mode(tmp_path):
    path = tmp_path / "secret"
    path.touch(mode=0o600)
    files.write(path, "text")
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_file_that_cannot_be_replaced_is_written_to(tmp_path):
    path = tmp_path / "mounted"
    path.write_text("old")
    with mock.patch.object(Path, "replace", side_effect=OSError(errno.EBUSY, "busy")):
        files.write(path, "text")
    assert path.read_text() == "text"
    assert [*tmp_path.iterdir()] == [path]


def test_a_folder_is_refused_before_anything_is_measured(tmp_path):
    with pytest.raises(OSError, match="directory"):
        agreement.writable(tmp_path)


def test_what_is_no_file_is_written_to(tmp_path):
    read, write = os.pipe()
    agreement.writable(f"/proc/self/fd/{write}")
    files.write(f"/proc/self/fd/{write}", "text")
    os.close(write)
    with os.fdopen(read) as end:
        assert end.read() == "text"
