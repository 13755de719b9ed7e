"""Untrusted files are read or refused with a reason; any payload decodes."""

import dataclasses
import json
import random
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cases import CASES
from cgx_jax import installation, untrusted, use_profile
from cgx_jax.commands import report, run_file
from cgx_jax.compressors import PayloadCompressor
from cgx_jax.exchanges import Profile
from cgx_jax.tuner import cache
from test_auto import MEASURED
from test_tuner_cache import FIELDS, KEY, OFFERED

ESCAPE = "\x1b]0;owned\x07"
BAD_JSON = {
    "deep": ("[" * 100_000, "nests deeper than 16 levels"),
    "deep objects": ('{"a":' * 100_000, "nests deeper than 16 levels"),
    "deep but parsed": ("[" * 100 + "]" * 100, "nests deeper than 16 levels"),
    "a terminal's escape": (json.dumps({"a": ESCAPE}), r"'\\x1b'.*not printable"),
    "an escape as a name": (json.dumps({ESCAPE: 1}), r"'\\x1b'.*not printable"),
    "text turned round": (json.dumps(["\u202e"]), r"'\\u202e'.*not printable"),
    "long text": (json.dumps(["x" * 5000]), "5000 characters, more than 4096"),
    "a huge number": ("[" + "9" * 4000 + "]", "more than 64 bits"),
    "a number too long to parse": ("[" + "9" * 10_000 + "]", "it is not JSON"),
    "half a surrogate": (r'["\ud800"]', "not printable"),
    "nothing": ("", "it is not JSON"),
    "no JSON": ("{]", "it is not JSON"),
}


@pytest.mark.parametrize("name", BAD_JSON)
def test_json_beyond_the_limits_is_refused_as_profile_and_as_log(name, tmp_path):
    text, says = BAD_JSON[name]
    with pytest.raises(ValueError, match=says):
        untrusted.loads(text)
    path = tmp_path / "file.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(
        ValueError, match=rf"file\.json: Profile: the text cannot be read: .*{says}"
    ):
        use_profile(path)
    if text:
        with pytest.raises(ValueError, match=rf"line 1 of .*file\.json is not .*{says}"):
            run_file.Run.read(path)


def test_files_that_are_too_long_or_no_text_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="file: it is not UTF-8 text"):
        use_profile(path)
    with pytest.raises(ValueError, match=r"line 1 of .*file is not UTF-8 text"):
        run_file.Run.read(path)
    monkeypatch.setattr(untrusted, "MOST_CHARACTERS", 100)
    for endless in (path, "/dev/zero"):
        path.write_text("[" + "1, " * 100)
        with pytest.raises(ValueError, match="it has more than 100 characters"):
            use_profile(endless)
    with pytest.raises(ValueError, match=r"line 1 of .* has more than 100 characters"):
        run_file.Run.read(path)
    monkeypatch.setattr(untrusted, "MOST_CHARACTERS", 1000)
    monkeypatch.setattr(untrusted, "MOST_LINES", 2)
    with pytest.raises(ValueError, match=r"has more than 2 lines"):
        run_file.Run.read(write(path, RUN, PLAN, PLAN))


PROFILE = json.loads(MEASURED.to_json())
BAD_PROFILES = {
    "an escape": ({"cpu": ESCAPE}, "not printable"),
    "a long name": ({"device": "x" * 201}, "201 characters, more than 200"),
    "an axis of two lines": ({"axis": "a\nb"}, "not printable"),
    "no ranks": ({"world": 0}, "world=0 is not a whole number in"),
    "too many ranks": ({"world": 1 << 40}, "world=1099511627776 is not"),
    "true for a number": ({"cores": True}, "cores=True is not"),
    "no bytes": ({"rows": [["psum", 32, 0, 1.0]]}, "whole bytes"),
    "true for bytes": ({"rows": [["psum", 32, True, 1.0]]}, "whole bytes"),
    "text for bytes": ({"rows": [["psum", 32, "4096", 1.0]]}, "whole bytes"),
    "too many bytes": ({"rows": [["psum", 32, 1 << 60, 1.0]]}, "whole bytes"),
    "a list for a method": ({"rows": [[["psum"], 32, 4096, 1.0]]}, "needs a method"),
    "too many rows": ({"rows": [["psum", 32, 4 + i, 1.0] for i in range(10_001)]}, "10001 rows"),
    "endless time": ({"latency": float("inf")}, "latency=inf is not a positive number"),
}


@pytest.mark.parametrize("name", BAD_PROFILES)
def test_profiles_of_impossible_machines_are_refused(name):
    changes, says = BAD_PROFILES[name]
    with pytest.raises(ValueError, match=rf"Profile: .*{says}.*tune again"):
        Profile.from_json(json.dumps(PROFILE | changes))


NAMES = {
    "Open MPI counts the zero": (
        "Open MPI v5.0.11, ident: 5.0.11\0",
        "Open MPI v5.0.11, ident: 5.0.11",
    ),
    "the first of lines": ("MPICH Version:\t4.3.0\nMPICH ABI: 17\n", "MPICH Version: 4.3.0"),
    "nothing": ("\0", ""),
    "long": ("x" * 1000, "x" * 200),
}


@pytest.mark.parametrize("name", NAMES)
def test_whatever_names_this_machine_goes_into_a_profile(name, monkeypatch):
    reported, shown = NAMES[name]
    library = types.SimpleNamespace(Get_library_version=lambda: reported)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", library)
    assert installation.mpi_library() == shown
    profile = dataclasses.replace(MEASURED, mpi=installation.mpi_library())
    assert Profile.from_json(profile.to_json()) == profile


TWO = {"name": "Quantize(bits=2)", "bits": 2, "work": ["rotation"], "nbytes": [1088, 2176]}
FOUR = {"name": "Quantize(bits=4)", "bits": 4, "work": [], "nbytes": [2112, 4224]}
RUN = {
    "kind": "run",
    "schema": 2,
    "paths": ["a", "b"],
    "sizes": [4096, 8192],
    "candidates": [TWO, FOUR],
}
REFRESH = {
    "kind": "refresh",
    "averages": {"error": [[2.0, 1.0], [3.0, 1.5]], "square": [9.0, 8.0]},
    "step": 10,
    "outcome": "kept",
    "bits": [4, 2],
    "nbytes": 4000,
    "error": 4.0,
    "relative": [0.1, float("nan")],
    "unusable": [],
    "nonfinite": ["a"],
}
PLAN = {"kind": "plan", "step": 0, "bits": [4, 4], "wire_bytes": 9, "compile_seconds": 1.5}
SCALARS = {"kind": "scalars", "step": 1, "loss": 2.0}
ENTRIES = [RUN, PLAN, SCALARS, REFRESH]


def write(path, *entries):
    path.write_text("".join(json.dumps(e) + "\n" for e in entries))
    return path


def test_the_log_that_others_damage_is_read(tmp_path, capsys):
    path = write(tmp_path / "log", *ENTRIES, RUN)
    report.run([path], None)
    assert "1 looks at their statistics" in capsys.readouterr().out


BAD_ENTRIES = {
    "empty averages": (REFRESH | {"averages": {}}, "error is missing in {}"),
    "averages of one leaf": (
        REFRESH | {"averages": {"error": [[1, 1]], "square": [1]}},
        "is not a list of 2",
    ),
    "text as an average": (
        REFRESH | {"averages": {"error": [[1, 1], [1, "x"]], "square": [1, 1]}},
        "error='x' is not a number",
    ),
    "endless averages": (
        REFRESH | {"averages": {"error": [[1, 1], [1, 1e300]], "square": [1, 1]}},
        r"outside \[0, 1e\+60\)",
    ),
    "an unknown outcome": (REFRESH | {"outcome": "won"}, "outcome='won' is not one of"),
    "text for nonfinite leaves": (REFRESH | {"nonfinite": "abc"}, "nonfinite='abc' is not a list"),
    "90 bits": (REFRESH | {"bits": [90, 4]}, r"bits=90 is not a whole number in \[1, 64\]"),
    "bits of one leaf": (PLAN | {"bits": [4]}, "is not a list of 2"),
    "a negative size": (PLAN | {"wire_bytes": -1}, "wire_bytes=-1 is not a whole number"),
    "text as seconds": (PLAN | {"compile_seconds": "1"}, "compile_seconds='1' is not a number"),
    "a size of 0": (RUN | {"sizes": [0, 8192]}, "a size=0 is not a whole number in"),
    "text as a size": (RUN | {"sizes": ["4096", 8192]}, "a size='4096' is not"),
    "sizes of one leaf": (RUN | {"sizes": [4096]}, "is not a list of 2"),
    "a number as a path": (RUN | {"paths": ["a", 3]}, "a path=3 is not text"),
    "an escape as a path": (RUN | {"paths": ["a", ESCAPE]}, "not printable"),
    "no candidates": (RUN | {"candidates": []}, "not in ascending order"),
    "candidates that descend": (RUN | {"candidates": [FOUR, TWO]}, "not in ascending order"),
    "a candidate of 90 bits": (RUN | {"candidates": [FOUR | {"bits": 90}]}, "bits=90 is not"),
    "a candidate without a name": (
        RUN | {"candidates": [FOUR | {"name": 4}]},
        "name=4 is not text",
    ),
    "an escape as a name": (RUN | {"candidates": [FOUR | {"name": ESCAPE}]}, "not printable"),
    "an unknown kind of work": (
        RUN | {"candidates": [FOUR | {"work": ["x"]}]},
        r"work=.* not a list",
    ),
    "bytes of one leaf": (RUN | {"candidates": [FOUR | {"nbytes": [1]}]}, "is not a list of 2"),
    "no bytes": (RUN | {"candidates": [FOUR | {"nbytes": [0, 1]}]}, "nbytes=0 is not a whole"),
    "too many bytes": (
        RUN | {"candidates": [FOUR | {"nbytes": [1 << 49, 1 << 50]}]},
        "the sum of nbytes=",
    ),
    "other leaves": (RUN | {"sizes": [4096, 4096]}, "its own log"),
    "text as a curve": (SCALARS | {"loss": "low"}, "loss='low' is not a number"),
    "a fraction as a step": (SCALARS | {"step": 0.5}, "step=0.5 is not a whole number"),
    "another kind": ({"kind": "none"}, "its kind, 'none', is unknown"),
    "no object": ([1], r"kind is missing in \[1\]"),
}


@pytest.mark.parametrize("name", BAD_ENTRIES)
def test_damaged_entries_are_refused_with_file_line_and_reason(name, tmp_path):
    entry, says = BAD_ENTRIES[name]
    path = write(tmp_path / "log", *ENTRIES, entry)
    with pytest.raises(ValueError, match=rf"report: line 5 of .*log is not .*{says}"):
        run_file.Run.read(path)
    if isinstance(entry, dict) and entry["kind"] != "run":
        with pytest.raises(ValueError, match=r"line 1 of .*no entry of kind 'run'"):
            run_file.Run.read(write(path, entry))


JUNK = [None, True, -1, 0, 1, 2.5, 1e308, float("nan"), "", "x", [], [[]], {}, {"a": 1}, [1, "x"]]


def damaged(value, rng):
    """Returns a copy of a JSON value in which one part, at any depth, is something else."""
    if not value or not isinstance(value, (list, dict)) or rng.random() < 0.2:
        return rng.choice(JUNK)
    copy = list(value) if isinstance(value, list) else dict(value)
    keys = range(len(copy)) if isinstance(copy, list) else list(copy)
    key = rng.choice(keys)
    if rng.random() < 0.2:
        del copy[key]
    else:
        copy[key] = damaged(copy[key], rng)
    return copy


def test_whatever_is_damaged_is_read_or_a_value_error(tmp_path, capsys):
    rng = random.Random(0)
    read = 0
    for _ in range(120):
        entries = [*ENTRIES, REFRESH]
        i = rng.randrange(len(entries))
        entries[i] = damaged(entries[i], rng)
        path = write(tmp_path / "log", *entries)
        try:
            report.run([path], None)
            read += 1
        except ValueError:
            pass
        try:
            made = Profile.from_json(json.dumps(damaged(PROFILE, rng)))
            assert dataclasses.asdict(made)
        except ValueError:
            pass
    capsys.readouterr()
    assert 0 < read < 120


def read_profile(path):
    return Profile.from_json(untrusted.read(path))


def read_cache(path):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        cache.find(path.parents[1], KEY, OFFERED.setting)
    assert all(w.category is RuntimeWarning for w in said), said


def kept_in_cache(folder):
    cache.keep(folder, KEY, FIELDS)
    return next(folder.rglob("*.json"))


def profile_file(folder):
    path = folder / "profile.json"
    path.write_text(MEASURED.to_json())
    return path


FILES = {
    "profile": (profile_file, read_profile),
    "log": (lambda folder: write(folder / "log", *ENTRIES), run_file.Run.read),
    "the tuner's cache": (kept_in_cache, read_cache),
}
# Tokens that could break JSON, Python's JSON reader, or the code that uses the values.
TOKENS = [b"NaN", b"-Infinity", b"1e999", b"-0", b"9" * 30, b"null", b"true", b'"', b"[", b"}"]
EDIT = st.tuples(
    st.integers(0, 5000), st.integers(0, 40), st.one_of(st.sampled_from(TOKENS), st.binary())
)


def edited(data, edits):
    """Returns a file's bytes, with some cut out and others put in their place."""
    for at, cut, put in edits:
        at %= len(data) + 1
        data = data[:at] + put + data[at + cut :]
    return data


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(edits=st.lists(EDIT, min_size=1, max_size=3))
@example(edits=[(0, 100_000, b"")])
@example(edits=[(1, 0, b"\xff")])
@example(edits=[(1, 0, b'"a": 1, "a": ')])
@example(edits=[(0, 100_000, b"[" * 100_000)])
def test_whatever_bytes_are_edited_the_file_is_read_or_a_value_error(name, edits, tmp_path_factory):
    make, read = FILES[name]
    path = make(tmp_path_factory.mktemp("files"))
    read(path)
    path.write_bytes(edited(path.read_bytes(), edits))
    said = ""
    try:
        read(path)
    except ValueError as error:
        said = str(error)
    assert said.isprintable()


PAYLOADS = {
    name: case.compressor
    for name, case in CASES.items()
    if isinstance(case.compressor, PayloadCompressor)
}


@pytest.mark.parametrize("name", PAYLOADS)
def test_any_bytes_decode_to_arrays_of_the_leaf(name):
    c, rng, size = PAYLOADS[name], np.random.default_rng(5), 1000
    n = c.payload_bytes(size)
    noise = rng.integers(0, 256, (4, n))
    payloads = np.concatenate([noise, np.zeros((1, n)), np.full((1, n), 255)]).astype(np.uint8)
    total = jax.jit(lambda p: c.decode_sum(p, (size,)))(payloads)
    each = jax.jit(jax.vmap(lambda p: c.decode(p, (size,), jnp.float32)))(payloads)
    assert total.shape == (size,)
    assert each.shape == (6, size)
