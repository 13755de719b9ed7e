"""Failures of the run log never end a training run."""

import pathlib
import warnings

import jax
import pytest

from adaptive_training import WIDTHS, Training
from cgx_jax import Adaptive
from cgx_jax.commands import run_file
from cgx_jax.policies.menu import Menu
from cgx_jax.policies.run_log import RunLog
from cgx_jax.transforms import SyncState

# The collectives of statistics and gradients do not wait for each other: see `no_cache`.
pytestmark = pytest.mark.usefixtures("no_cache")


FULL = pathlib.Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full")


@needs_full
def test_training_goes_on_with_a_full_disk_and_warns_once():
    policy = Adaptive(candidates=WIDTHS, warmup=4, every=4, sample_every=2, log=FULL)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training = Training(policy)
        for _ in range(10):
            training.run(1)
            policy.record(loss=1.0)
    about = [w for w in caught if "cannot be written" in str(w.message)]
    assert [w.category for w in about] == [RuntimeWarning]
    assert "log='/dev/full' cannot be written ([Errno 28] No space left" in str(about[0].message)
    assert policy.history
    (state,) = (s for s in jax.tree.leaves(training.state, is_leaf=is_sync) if is_sync(s))
    assert state.step == 10  # the donated states of all steps came back


def is_sync(x):
    return isinstance(x, SyncState)


class HalfWritten:
    """A raw file on a disk that has room for ten more bytes."""

    def __init__(self, file):
        self.file = file

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()

    def __getattr__(self, name):
        return getattr(self.file, name)

    def write(self, data):
        return self.file.write(data[:10])


def test_half_an_entry_is_taken_back_and_later_ones_are_written(tmp_path, monkeypatch):
    path = tmp_path / "log"
    log = RunLog(path)
    log.run(Menu.of((), WIDTHS))
    before, opened = path.read_bytes(), pathlib.Path.open
    with monkeypatch.context() as full:
        full.setattr(pathlib.Path, "open", lambda *a, **k: HalfWritten(opened(*a, **k)))
        with pytest.warns(RuntimeWarning, match="No space left on device"):
            log.write("scalars", step=1, loss=2.0)
        log.write("scalars", step=2, loss=2.0)
    assert path.read_bytes() == before
    log.write("scalars", step=3, loss=2.0)
    assert run_file.Run.read(path).scalars["loss"].tolist() == [[3, 2]]
