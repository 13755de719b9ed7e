"""The choice of an exchange: a pure function of a profile, and what is no profile."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from cgx_jax import Quantize, psum_compressed, use_profile
from cgx_jax.choice import Auto, Profile, auto
from cgx_jax.choice.auto import Load
from cgx_jax.choice.profile import Codec, Row
from cgx_jax.exchanges import Mpi, Xla, mpi
from cgx_jax.host import installation
from profiles import CODEC, MB, MEASURED, profile

SLOW_CODEC = Codec(plain=1e-9, noise=3e-9, rotation=5e-9, units=2e-9)


def fp32(nbytes, bits=4.125):
    return Load(nbytes // 4, bits)


BOTH = ("mpi", "xla")
CASES = {
    "small: psum": (BOTH, fp32(MB // 10), "psum"),
    "smaller than measured: as the smallest": (BOTH, fp32(4), "psum"),
    "a gain of 2 % is none": (BOTH, fp32(MB), "psum"),
    "large: the fastest": (BOTH, fp32(10 * MB), "mpi"),
    "large, without mpi": (("xla",), fp32(10 * MB), "xla"),
    "larger than measured: in proportion": (("xla",), fp32(1000 * MB), "xla"),
    "8 bits gain 2 %": (("xla",), fp32(10 * MB, 8.125), "psum"),
    "between widths": (("xla",), fp32(10 * MB, 6), "xla"),
    "narrower than measured: as the narrowest": (("xla",), fp32(10 * MB, 1.125), "xla"),
    "wider than measured: in proportion": (("xla",), fp32(10 * MB, 16), "psum"),
    "wider, over mpi": (BOTH, fp32(10 * MB, 16), "mpi"),
    "nothing usable": ((), fp32(10 * MB), "psum"),
    "not measured": (("nccl",), fp32(10 * MB), "psum"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_fastest_method_is_chosen(name):
    usable, load, expected = CASES[name]
    assert auto.fastest(MEASURED, usable, load) == expected


SIZES = [2**i for i in range(12, 27, 2)]
WIDTHS = [2.125, 4.125, 8.125]
seconds = st.floats(1e-6, 10)


@st.composite
def profiles(draw):
    rows = [("psum", 32, size, draw(seconds)) for size in SIZES]
    rows += [(m, w, size, draw(seconds)) for m in BOTH for w in WIDTHS for size in SIZES]
    return profile(rows)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    made=profiles(),
    usable=st.sets(st.sampled_from(BOTH)),
    nbytes=st.integers(4, 2**32),
    bits=st.floats(1, 16),
)
def test_what_is_chosen_is_never_slower_than_psum_and_none_of_the_others(
    made, usable, nbytes, bits
):
    load = fp32(nbytes, bits)
    method = auto.fastest(made, tuple(usable), load)
    taken = auto.estimate(made, method, load)
    assert method in {"psum", *usable}
    assert taken <= auto.estimate(made, "psum", load)
    if method != "psum":
        assert all(taken <= auto.estimate(made, other, load) for other in usable)


def test_a_profile_survives_json_and_a_row_is_a_line():
    made = dataclasses.replace(MEASURED, mpi="MPICH Version: 5.0.2", engine=mpi.defaults())
    text = made.to_json()
    assert Profile.from_json(text) == made
    assert isinstance(Profile.from_json(text).rows[0], Row)
    assert '  ["xla", 4.125, 1000000, 0.0015],' in text.splitlines()
    assert Profile.from_json(text).codec == CODEC


def edited(**changes):
    fields = json.loads(MEASURED.to_json()) | changes
    return json.dumps({k: v for k, v in fields.items() if v != "gone"})


def mpi_with(**options):
    return {"exchange": "mpi"} | options


BAD_TEXT = {
    "another schema": (edited(schema=1), "schema=1, .* reads 5"),
    "no schema": (edited(schema="gone"), "schema=None"),
    "a field too many": (edited(color=1), r"missing \[\], unknown \['color'\]"),
    "no speed": (edited(algbw=float("nan")), "algbw=nan"),
    "a codec of one kind": (edited(codec={"plain": 1e-9}),
                            r"codec has fields missing \['noise', 'rotation', 'units'\]"),
    "a codec of no kind": (edited(codec=None), "codec=None"),
    "an engine of no exchange": (edited(engine={"streams": 4}),
                                 "engine=.*exchange='nccl'.*streams"),
    "an engine of one option": (edited(engine=mpi_with(window=4)),
                                "engine=.*segment_bytes.*threads"),
    "an engine of text": (edited(engine=mpi_with(**dict.fromkeys(Mpi.tuned, "4"))),
                          "engine: segment_bytes='4'"),
    "an engine that cannot run": (edited(engine=mpi_with(**dict.fromkeys(Mpi.tuned, 1))),
                                  "segment_bytes=1 "),
    "an engine of nine streams": (edited(engine={"exchange": "nccl", "streams": 9}),
                                  r"Nccl: streams=9 must be a whole number in \[1, 8\]"),
    "a codec of no time": (edited(codec=CODEC._asdict() | {"noise": 0}), "codec noise=0 "),
    "no psum": (edited(rows=[["xla", 4, 4096, 1e-3]]), "no row has the method psum"),
    "a short row": (edited(rows=[["psum", 32, 4096]]),
                    r"rows\[0\]=.* is not an object with the fields .*seconds"),
    "an unknown method": (edited(rows=[["pigeon", 4, 4096, 1.0]]), "pigeon.*psum.*mpi.*xla"),
    "no bits": (edited(rows=[["psum", 0, 4096, 1.0]]), "bits in 0..32"),
    "a negative time": (edited(rows=[["psum", 32, 4096, -1.0]]), "positive seconds"),
    "a row twice": (edited(rows=[["psum", 32, 4096, 1.0]] * 2), "two rows"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_TEXT)
def test_what_is_no_profile_is_refused_with_the_remedy(name):
    text, message = BAD_TEXT[name]
    with pytest.raises(ValueError, match=rf"Profile: .*{message}.*cgx_jax\.tune again"):
        Profile.from_json(text)


@pytest.mark.parametrize("name", [*installation.facts(), "hosts"])
def test_a_stale_profile_is_refused_with_both_values(name):
    here = installation.facts() | {"hosts": 1}
    other = 12345 if isinstance(here[name], int) else "another"
    stale = dataclasses.replace(MEASURED, **(here | {name: other}))
    both = re.escape(f"measured with {name} {other!r}, but here it is {here[name]!r}")
    with pytest.raises(ValueError, match=both + r".*tune again, or use_profile\(None\)"):
        use_profile(stale)


def test_auto_follows_the_profile_that_it_is_given():
    here = dataclasses.replace(MEASURED, **installation.facts())
    given, load = Auto(here), fp32(10 * MB)
    assert given.choose("here", (Mpi(), Xla()), here.world, load) == Mpi()
    assert given.choose("here", (Mpi(), Xla()), here.world, fp32(4)) is None
    with pytest.raises(ValueError, match=r"here: this call has 3 ranks"):
        given.choose("here", (Xla(),), 3, load)
    with pytest.raises(ValueError, match="measured with cpu"):
        Auto(dataclasses.replace(here, cpu="another")).choose("here", (Xla(),), here.world, load)


def test_mpi_runs_with_the_options_that_it_was_measured_with():
    engine = Mpi(segment_bytes=32768, window=8, threads=2)
    here = dataclasses.replace(MEASURED, **installation.facts(), engine=engine)
    load = fp32(10 * MB)
    assert Auto(here).choose("here", (Mpi(), Xla()), here.world, load) == engine
    once = dataclasses.replace(here, rows=(*here.rows, Row("mpi/gather_sum", 4.125, MB, 1e-6)))
    taken = Auto(once).one_shot("here", (Mpi(), Xla()), (Mpi(),), here.world, fp32(MB))
    assert taken == engine


@pytest.mark.parametrize(
    ("nbytes", "gathers", "taken"),
    [(MB, False, None), (MB, True, Xla()), (2 * MB, False, Mpi()), (2 * MB, True, Mpi())],
)
def test_gather_sum_is_priced_by_its_own_rows_as_far_as_they_reach(nbytes, gathers, taken):
    rows = (Row("xla/gather_sum", 4.125, MB, 1e-4), Row("mpi/gather_sum", 4.125, MB, 2e-4))
    here = dataclasses.replace(MEASURED, **installation.facts(), rows=(*MEASURED.rows, *rows))
    usable = (Mpi(), Xla())
    assert Auto(here).choose("here", usable, 4, fp32(nbytes), gathers=gathers) == taken


@pytest.mark.parametrize(
    ("world", "two_phases", "one_phase", "taken"),
    [
        (2, 1e-4, 1.04e-4, "mpi/gather_sum"),
        (2, 1e-4, 1.06e-4, "mpi"),
        (2, 2.99e-3, 3e-3, "mpi/gather_sum"),
        (2, 1.1, 1.09, "psum"),
        (4, 1e-4, 1.01e-4, "mpi"),
        (4, 1e-4, 0.99e-4, "mpi/gather_sum"),
    ],
)
def test_one_phase_wins_ties_between_two_ranks(world, two_phases, one_phase, taken):
    rows = [("psum", 32, MB, 1.0), ("mpi", 4.125, MB, two_phases)]
    measured = profile([*rows, ("mpi/gather_sum", 4.125, MB, one_phase)], world=world)
    assert auto.fastest(measured, ("mpi", "mpi/gather_sum"), fp32(MB)) == taken


NATIVE, NONE = object(), None
# platform, native kernels, usable exchanges, load, the method without a profile
UNMEASURED = {
    "4 kB": ("cpu", NATIVE, BOTH, fp32(4000), "psum"),
    "300 kB": ("cpu", NATIVE, BOTH, fp32(300_000), "psum"),
    "1 MB over MPI": ("cpu", NATIVE, BOTH, fp32(MB), "mpi"),
    "1 MB without MPI": ("cpu", NATIVE, ("xla",), fp32(MB), "psum"),
    "4 MB": ("cpu", NATIVE, ("xla",), fp32(4 * MB), "xla"),
    "25 MB": ("cpu", NATIVE, ("xla",), fp32(25 * MB), "xla"),
    "2.5 MB at 4 bits": ("cpu", NATIVE, ("xla",), fp32(5 * MB // 2), "xla"),
    "2.5 MB at 8 bits": ("cpu", NATIVE, ("xla",), fp32(5 * MB // 2, 8.125), "psum"),
    "half the bytes, one direction at a time": ("cpu", NATIVE, ("xla",), fp32(64 * MB, 16), "psum"),
    "half the bytes, both directions": ("cpu", NATIVE, BOTH, fp32(64 * MB, 16), "mpi"),
    "more bytes than uncompressed": ("cpu", NATIVE, BOTH, fp32(64 * MB, 40), "psum"),
    "nothing to send with": ("cpu", NONE, ("xla",), fp32(64 * MB), "psum"),
    "14 MB on a GPU": ("gpu", NATIVE, ("nccl", "xla"), fp32(14 * MB), "psum"),
    "25 MB on a GPU": ("gpu", NATIVE, ("nccl", "xla"), fp32(25 * MB), "xla"),
    "a GPU without kernels": ("gpu", NONE, ("xla",), fp32(64 * MB), "psum"),
    "a TPU": ("tpu", NATIVE, ("xla",), fp32(64 * MB), "psum"),
}


@pytest.mark.parametrize("name", UNMEASURED)
def test_without_a_profile_what_may_lose_goes_by_psum(name, pretend):
    platform, kernels, usable, load, expected = UNMEASURED[name]
    pretend(platform=platform, kernels=kernels, cuda_kernels=kernels)
    taken = Auto().choose("here", [auto.exchange_named("here", name) for name in usable], 4, load)
    assert expected == ("psum" if taken is None else taken.shorthand)


@pytest.mark.parametrize(("platform", "compressed"), [("cpu", True), ("tpu", False)])
def test_the_rule_is_that_of_the_mesh_and_not_of_the_process(platform, compressed):
    device = jax.sharding.AbstractDevice(device_kind="any", num_cores=1, platform=platform)
    types = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((4,), ("data",), axis_types=types, abstract_device=device)

    def summed(x):
        return psum_compressed(x, "data", Quantize(4))

    mapped = jax.shard_map(summed, mesh=mesh, in_specs=P("data"), out_specs=P())
    program = str(jax.make_jaxpr(mapped)(jax.ShapeDtypeStruct((4 << 22,), jnp.float32)))
    assert ("cgx_encode" in program) == compressed, program


def slow_codec(load, **kinds):
    return dataclasses.replace(load, **{kind: load.values for kind in kinds if kinds[kind]})


KINDS = {
    "plain": {},
    "noisy": {"noisy": True},
    "rotated": {"rotated": True},
    "in units": {"in_units": True},
    "all": {"noisy": True, "rotated": True, "in_units": True},
}
# 2.5 million values: xla takes 5 ms and mpi 2 ms plain, psum 10 ms. Noise adds 2 ns per value,
# rotation 4 ns, units 1 ns.
PRICED = {
    ("plain", ("xla",)): (5e-3, "xla"),
    ("noisy", ("xla",)): (10e-3, "psum"),
    ("rotated", ("xla",)): (15e-3, "psum"),
    ("in units", ("xla",)): (7.5e-3, "xla"),
    ("all", ("xla",)): (22.5e-3, "psum"),
    ("plain", ("mpi",)): (2e-3, "mpi"),
    ("noisy", ("mpi",)): (7e-3, "mpi"),
    ("rotated", ("mpi",)): (12e-3, "psum"),
    ("in units", ("mpi",)): (4.5e-3, "mpi"),
    ("all", ("mpi",)): (19.5e-3, "psum"),
}


@pytest.mark.parametrize(("kind", "usable"), PRICED)
def test_noise_and_rotation_are_priced(kind, usable):
    seconds, expected = PRICED[kind, usable]
    load = slow_codec(fp32(10 * MB), **KINDS[kind])
    slow = dataclasses.replace(MEASURED, codec=SLOW_CODEC)
    assert auto.estimate(slow, usable[0], load) == pytest.approx(seconds)
    assert auto.fastest(slow, usable, load) == expected
    assert auto.estimate(slow, "psum", load) == pytest.approx(10e-3)


def test_a_kind_that_measures_faster_than_plain_costs_nothing():
    quick = dataclasses.replace(MEASURED, codec=Codec(2e-9, 1e-9, 1e-9, 1e-9))
    load = slow_codec(fp32(10 * MB), **KINDS["all"])
    assert auto.estimate(quick, "xla", load) == pytest.approx(5e-3)


def test_decoding_every_payload_is_priced():
    """With 4 ranks `gather_sum` decodes 4 payloads, `scatter_gather` 7/4 of one."""
    rows = [*MEASURED.rows, Row("xla/gather_sum", 4.125, MB, 1e-3)]
    made = profile(rows, codec=CODEC)
    load = dataclasses.replace(fp32(MB), rotated=MB // 4)
    cost = lambda method, load: auto.estimate(made, method, load)  # noqa: E731
    beyond = [cost(m, load) - cost(m, fp32(MB)) for m in ("xla", "xla/gather_sum")]
    assert beyond[1] / beyond[0] == pytest.approx(4 / (7 / 4))
