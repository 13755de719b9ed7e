"""Untrusted files are read or refused with a reason; any payload decodes."""

import dataclasses
import json
import re
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import cgx_jax
from adaptive_training import LIKE, Training, adaptive
from cases import CASES, every
from cgx_jax import use_profile
from cgx_jax.choice import Profile
from cgx_jax.compressors import PayloadCompressor
from cgx_jax.host import installation, untrusted
from cgx_jax.tuning import cache
from profiles import MEASURED
from tuning_steps import CACHEABLE, FIELDS, KEY

ESCAPE = "\x1b]0;owned\x07"


def read_profile(path):
    try:
        use_profile(path)
    finally:
        use_profile(None)


def read_cache(path):
    """Reads a file of the tuner's cache; its warning is raised as a ValueError."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        cache.find(path.parents[1], KEY, CACHEABLE.setting)
    for warning in said:
        assert warning.category is RuntimeWarning
        raise ValueError(str(warning.message))


def read_state(path):
    """Reads a policy's state, before and after the policy knows its tree."""
    for known_first in (True, False):
        policy = adaptive()
        if known_first:
            cgx_jax.Plan.build(LIKE, policy)
        policy.load_state_dict(untrusted.loads(untrusted.read(path)))
        cgx_jax.Plan.build(LIKE, policy)
        assert policy.metrics()["cgx/plans"] == 2


@pytest.fixture(scope="module")
def texts():
    """The text of each kind of file: of a state with a look, and statistics for the next one."""
    policy = adaptive(every=6)
    Training(policy).run(11)
    state = policy.state_dict()
    assert state["history"]
    assert state["pending"]
    here = dataclasses.replace(MEASURED, **installation.facts())
    fields = {"schema": 1, "topology": KEY.topology, "tree": KEY.tree}
    return {
        "profile": here.to_json(),
        "cache": json.dumps(fields | {"setting": FIELDS}),
        "state": json.dumps(state),
    }


FILES = {
    "profile": (read_profile, "profile.json", "profile.json: Profile: .*cgx_jax.tune again"),
    "cache": (read_cache, f"{KEY.folder}/{KEY.tree}.json", f"{KEY.tree}.json: .*measured again"),
    "state": (read_state, "state.json", "Adaptive: the saved policy .*(Without|[Pp]ass)"),
}


def written(name, text, folder):
    path = folder / FILES[name][1]
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def replaced(text, at, value):
    """Returns a JSON text with `value` in the place `at`, or without that place for None."""
    fields = part = json.loads(text)
    *outer, last = at
    for key in outer:
        part = part[key]
    if value is None:
        del part[last]
    else:
        part[last] = value
    return json.dumps(fields)


# Kind of file, the place that is changed, what is put there, what the error says.
BAD = [
    ("profile", ["cpu"], ESCAPE, r"'\\x1b\]0;owned\\x07' is not printable"),
    ("profile", ["device"], "x" * 201, "201 characters, more than 200"),
    ("profile", ["axis"], "a\nb", "not printable"),
    ("profile", ["world"], 0, "world=0 is not a whole number in"),
    ("profile", ["world"], 1 << 40, "world=1099511627776 is not"),
    ("profile", ["rows"], None, r"missing \['rows'\]"),
    ("profile", ["latency"], 0, "latency=0 is not a positive number"),
    ("profile", ["world"], 1 << 64, "world=18446744073709551616 is not int"),
    ("profile", ["cores"], True, "cores=True is not int"),
    ("profile", ["cores"], None, r"fields missing \['cores'\], unknown \[\]"),
    ("profile", [ESCAPE], 1, r"unknown \['\\x1b"),
    ("profile", ["latency"], float("inf"), "latency=inf is not a positive number"),
    ("profile", ["rows", 0], ["psum", 32, 0, 1.0], "bytes in 1.."),
    ("profile", ["rows", 0, 2], True, r"rows\[0\]\[2\]=True is not int"),
    ("profile", ["rows", 0, 2], 1 << 60, "bytes in 1.."),
    ("profile", ["rows", 0, 0], ["psum"], r"rows\[0\]\[0\]=\['psum'\] is not str"),
    ("profile", ["rows"], [["psum", 32, 4 + i, 1.0] for i in range(10_001)], "10001 rows"),
    ("cache", ["tree"], None, r"it has fields missing \['tree'\]"),
    ("cache", ["topology"], [], r"it topology=\[\] is not dict"),
    ("cache", ["setting", "fusion_bytes"], 1 << 50, "fusion_bytes=1125899906842624 is not a whole"),
    ("state", ["format"], 1, "format=1, but this version of cgx_jax reads 6"),
    ("state", ["step"], None, r"it has fields missing \['step'\]"),
    ("state", ["step"], 0.5, "it step=0.5 is not int"),
    ("state", ["leaves", 0, 1], "x", r"it leaves\[0\]\[1\]='x' is not tuple"),
    ("state", ["leaves", 0, 2], ESCAPE, r"leaf of dtype '\\x1b"),
    ("state", ["leaves", 0, 2], "f4,(", r"leaf of dtype 'f4,\(', which is not known"),
    ("state", ["step"], -1, "step=-1 is not a whole number"),
    ("state", ["current", "plans"], [[0, 0, 0]] * 2, "current has 2 plans"),
    ("state", ["history", 0, "outcome"], "won", r"history\[0\] outcome='won' is none of"),
    ("state", ["history", 0, "norm"], 0.0, r"history\[0\] norm=0.0 is not a positive number"),
    ("state", ["history", 0, "norm"], float("nan"), r"norm=nan is not a positive number"),
    ("state", ["pending", 1, 2, 0], -1.0, "pending has -1, but its squares"),
    ("state", ["history", 0, "bits", 1], "8", r"it history\[0\] bits\[1\]='8' is not int"),
    ("state", ["history", 0, "color"], 1, r"it history\[0\] has fields missing .* \['color'\]"),
    ("state", ["adaptive"], [0, 2], "adapts leaf 0 where this one has 1"),
    ("state", ["candidates", 0], "Quantize(3)", r"has the candidate 'Quantize\(3\)' where"),
    ("state", ["history", 0, "relative"], [0.1], "something for 1 adaptive leaves, but adapts 3"),
    ("state", ["current", "plans", 0, 0], 99, "plans .*99.*but only"),
    ("state", ["current", "plans", 0, 0], -1, "plans .*-1.*but only"),
    # Only compressors at hand are made, whatever the file names.
    ("state", ["current", "compressors", 0], ESCAPE, "compressor .*neither a candidate"),
    ("state", ["plans", "plans", 1], [0], "something for 1 adaptive leaves, but adapts 3"),
    ("state", ["pending", 1, 1, 0], [1.0], "statistics .* not of 3 adaptive leaves and 7"),
    ("state", ["pending", 1, 0], [1.0], "statistics .* not of 3 adaptive leaves and 7"),
    ("state", ["pending", 1, 3], "x", r"it pending\[1\]\[3\]='x' is not list"),
    ("state", ["nonfinite"], [0.0], "something for 1 adaptive leaves, but adapts 3"),
]


@pytest.mark.parametrize(("name", "at", "value", "says"), BAD)
def test_a_wrong_part_is_refused_by_name_with_value_and_remedy(
    name, at, value, says, texts, tmp_path
):
    read, _, frame = FILES[name]
    path = written(name, replaced(texts[name], at, value), tmp_path)
    with pytest.raises(ValueError, match=frame) as refused:
        read(path)
    assert re.search(says, str(refused.value))
    assert str(refused.value).isprintable()


NO_JSON = {
    "deep": ("[" * 100_000, "nests too deep"),
    "a number too long to parse": ("[" + "9" * 10_000 + "]", "it is not JSON"),
    "half of it": ('{"schema": ', "it is not JSON"),
    "nothing": ("", "it is not JSON"),
    "a field twice": ('{"world": 2, "world": 4}', "an object has 'world' twice"),
    "a list": (json.dumps([ESCAPE]), r"\['\\x1b\]0;owned\\x07'\] is not an object"),
    "no text": (b"\xff\xfe", "it is not UTF-8 text"),
}


@pytest.mark.parametrize("name", ["profile", "cache"])
@pytest.mark.parametrize("case", NO_JSON)
def test_what_is_no_object_of_json_is_refused_with_the_file_s_name(name, case, tmp_path):
    text, says = NO_JSON[case]
    read, _, frame = FILES[name]
    path = written(name, text, tmp_path)
    with pytest.raises(ValueError, match=frame) as refused:
        read(path)
    assert re.search(says, str(refused.value))


def test_a_file_without_an_end_is_refused(tmp_path):
    path = tmp_path / "long"
    with path.open("wb") as file:
        file.truncate(17 << 20)
    with pytest.raises(ValueError, match=r"long: .*more than 16777216 characters"):
        use_profile(path)
    with pytest.raises(OSError, match="/dev/zero is no regular file"):
        use_profile("/dev/zero")


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


# Tokens that could break JSON, Python's JSON reader, or the code that uses the values.
TOKENS = [b"NaN", b"-Infinity", b"1e999", b"-0", b"9" * 30, b"null", b"true", b'"', b"[", b"}"]
TOKENS += [b"{}", b"[]", b"-1", b"0.5", b'"x"']
EDIT = st.tuples(
    st.integers(0, 5000), st.integers(0, 40), st.one_of(st.sampled_from(TOKENS), st.binary())
)


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(edits=st.lists(EDIT, min_size=1, max_size=3))
@example(edits=[(1, 0, b"\xff")])
@example(edits=[(1, 0, b'"a": 1, "a": ')])
def test_whatever_bytes_are_edited_the_file_is_read_or_a_value_error(
    name, edits, texts, tmp_path_factory
):
    data = texts[name].encode()
    for at, cut, put in edits:
        at %= len(data) + 1
        data = data[:at] + put + data[at + cut :]
    folder, said = tmp_path_factory.mktemp("files"), ""
    FILES[name][0](written(name, texts[name], folder))
    path = written(name, data, folder)
    try:
        FILES[name][0](path)
    except ValueError as error:
        said = str(error)
    assert said.isprintable()


PAYLOADS = {
    name: case.compressor
    for name, case in CASES.items()
    if isinstance(case.compressor, PayloadCompressor)
}


@pytest.mark.parametrize("name", every(PAYLOADS))
@pytest.mark.quick(
    "rotated", "ternary", "top k", "top k of every bucket", "sampled threshold", "qsgd"
)
def test_any_bytes_decode_to_arrays_of_the_leaf(name):
    c, rng, size = PAYLOADS[name], np.random.default_rng(5), 1000
    n = c.payload_bytes(size)
    noise = rng.integers(0, 256, (4, n))
    payloads = np.concatenate([noise, np.zeros((1, n)), np.full((1, n), 255)]).astype(np.uint8)
    total = jax.jit(lambda p: c.decode_sum(p, (size,)))(payloads)
    each = jax.jit(jax.vmap(lambda p: c.decode(p, (size,), jnp.float32)))(payloads)
    assert total.shape == (size,)
    assert each.shape == (6, size)
