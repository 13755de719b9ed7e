"""What earlier runs found: where it lies, when it holds, and what is never trusted."""

import json
import os
import pathlib

import numpy as np
import pytest

from cgx_jax.compressors import Quantize, TopK
from cgx_jax.exchanges import Mpi, Xla
from cgx_jax.reductions import GatherSum, Levels
from cgx_jax.tuning import Setting, cache
from cgx_jax.tuning.cache import Key
from tuning_steps import CACHEABLE, FIELDS, KEY, NEAR, TRIAL_STEPS, WHOLE, Training, costs_of, tuner

SETTINGS = [
    Setting(),
    Setting(Xla()),
    Setting(Mpi(segment_bytes=32768, window=8, threads=2), fusion_bytes=1 << 22),
    Setting(Mpi(window=4), GatherSum(), NEAR),
    Setting(Xla(), None, Levels(groups=[[0, 1], [2, 3]]), 1 << 24),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_setting_survives_json(setting):
    assert CACHEABLE.setting(json.loads(json.dumps(setting.to_fields()))) == setting


def changed(**fields):
    return Setting(Mpi(window=4), GatherSum(), NEAR).to_fields() | fields


BAD_SETTINGS = {
    "no object": (None, "setting=None is not an object with the fields"),
    "an exchange that is not here": (changed(exchange="nccl"), "exchange='nccl' is not one of"),
    "an exchange of no name": (changed(exchange=["mpi"]), r"exchange=\['mpi'\] is not str"),
    "a reduction that is not tried": (changed(reduction="tree"), "reduction='tree' is not one of"),
    "other levels": (changed(levels="levels ('node',)"), "is not one of"),
    "an option that there is not": (changed(options={"color": 1}), "options=.* must be among"),
    "no options": (changed(options=[]), r"options=\[\] is not dict"),
    "a window of text": (changed(options={"window": "4"}), "window='4' is not a whole number"),
    "a window of one": (changed(options={"window": 1}), r"window=1 must be in \[2, 1024\]"),
    "buffers of nothing": (changed(fusion_bytes=0), "fusion_bytes=0 is not a whole number"),
}


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_what_is_no_setting_is_refused(name):
    fields, message = BAD_SETTINGS[name]
    with pytest.raises(ValueError, match=message):
        CACHEABLE.setting(fields)


def found(root, key=KEY):
    return cache.find(root, key, CACHEABLE.setting)


def test_only_the_same_job_finds_its_setting(tmp_path):
    assert found(tmp_path / "none") is None
    cache.keep(tmp_path, KEY, FIELDS)
    assert found(tmp_path) == Setting(Xla())
    assert found(tmp_path, Key(KEY.topology, "b" * 32)) is None
    assert found(tmp_path, Key({"cpu": "another", "world": 2}, KEY.tree)) is None


def test_a_file_is_replaced_as_a_whole(tmp_path, monkeypatch):
    cache.keep(tmp_path, KEY, FIELDS)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *names: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.warns(RuntimeWarning, match="cannot be written to .*disk full.*pass cache="):
            cache.keep(tmp_path, KEY, Setting().to_fields())
    assert found(tmp_path) == Setting(Xla())
    assert len(list(tmp_path.rglob("*"))) == 2  # the folder and the file, nothing half written
    cache.keep(tmp_path, KEY, Setting().to_fields())
    assert found(tmp_path) == Setting()


def damage(**fields):
    return lambda text: json.dumps(json.loads(text) | fields)


DAMAGED = {
    "another schema": (damage(schema=0), "schema=0, but this version of cgx_jax reads 1"),
    "other machines": (damage(topology={"cpu": "another"}), "belongs to other machines, versions"),
    "another tree": (damage(tree="e" * 32), "belongs to another tree than its name says"),
    "a foreign setting": (damage(setting=changed(exchange="pigeon")), "exchange='pigeon'"),
    "a terminal's commands": (damage(setting="\x1b[2J"), r"setting='\\x1b"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_file_that_is_damaged_or_foreign_is_said_once_and_measured_anew(tmp_path, name):
    spoil, message = DAMAGED[name]
    cache.keep(tmp_path, KEY, FIELDS)
    (path,) = tmp_path.rglob("*.json")
    path.write_text(spoil(path.read_text()))
    with pytest.warns(RuntimeWarning, match=f"Tuner: .*{path.name}: .*{message}") as said:
        assert found(tmp_path) is None
    assert len(said) == 1


FOLDERS = {
    "linux": ({"XDG_CACHE_HOME": "/caches"}, "/caches/cgx_jax"),
    "linux, a relative path": ({"XDG_CACHE_HOME": "caches"}, "/home/me/.cache/cgx_jax"),
    "linux, nothing set": ({}, "/home/me/.cache/cgx_jax"),
    "darwin": ({"XDG_CACHE_HOME": "/caches"}, "/home/me/Library/Caches/cgx_jax"),
    "win32": ({"LOCALAPPDATA": "/local"}, "/local/cgx_jax/Cache"),
    "win32, nothing set": ({}, "/home/me/AppData/Local/cgx_jax/Cache"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_the_folder_is_where_the_system_keeps_caches(name):
    variables, expected = FOLDERS[name]
    home = pathlib.Path("/home/me")
    folder = cache.user_folder(name.split(",")[0], variables, home)
    assert folder == pathlib.Path(expected)


def test_a_second_run_of_the_same_job_starts_tuned(tmp_path, monkeypatch):
    costs = costs_of(0.8, 0.5)
    first = Training(tuner(cache=tmp_path), monkeypatch=monkeypatch, costs=costs)
    first.run(TRIAL_STEPS + 1)
    again = Training(tuner(cache=tmp_path), monkeypatch=monkeypatch, costs=costs)
    again.run(1)
    assert again.ran == [WHOLE]
    assert again.tuner.metrics()["cgx/tuner"] == "cached"
    other = Training(tuner(cache=tmp_path), Quantize(8), monkeypatch=monkeypatch, costs=costs)
    other.run(1)
    assert other.tuner.state == "trying"


def test_a_setting_that_does_not_suit_the_compressor_is_not_taken(tmp_path):
    """A file may name a reduction that is tried for others."""

    def training():
        return Training(tuner(cache=tmp_path, reductions=["gather_sum", "ring"]), TopK(0.1))

    first = training()
    while first.tuner.state != "kept":
        first.run(1)
    (path,) = tmp_path.rglob("*.json")
    fields = json.loads(path.read_text())
    fields["setting"] |= {"exchange": "xla", "options": {}, "reduction": "ring"}
    path.write_text(json.dumps(fields))
    with pytest.warns(RuntimeWarning, match=f"{path.name}: .*does not suit .*measured again"):
        training().run(2)


def test_a_setting_with_levels_is_taken(tmp_path):
    def training():
        return Training(tuner(cache=tmp_path, levels=[halves]))

    halves = Levels(groups=[[0], [1]])
    first = training()
    while first.tuner.state != "kept":
        first.run(1)
    (path,) = tmp_path.rglob("*.json")
    setting = Setting(Xla(), None, halves)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"setting": setting.to_fields()}))
    again = training()
    again.run(1)
    assert (again.tuner.state, again.tuner.current) == ("cached", setting)


def test_a_user_without_a_home_is_told_and_has_no_cache(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(pathlib.Path, "home", homeless)
    with pytest.warns(RuntimeWarning, match="no folder for caches .*home.*pass cache="):
        assert cache.folder(True) is None


def test_a_tuner_without_a_cache_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "user_folder", lambda *_: tmp_path)
    Training(tuner(), monkeypatch=monkeypatch, costs=costs_of(0.8, 0.5)).run(TRIAL_STEPS + 1)
    assert not list(tmp_path.iterdir())
    by_default = tuner(cache=True)
    assert by_default._folder == tmp_path
    np.testing.assert_equal(by_default.metrics()["cgx/tuner"], "waiting")
