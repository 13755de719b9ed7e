"""The soak finds defects, and a short soak runs, survives kills and leaves nothing behind."""

import functools
import gc
import inspect
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import cgx_jax
import scripts
from processes import ENVIRONMENT, needs_mpi

ROOT = Path(__file__).parents[1]
SOAK = ROOT / "benchmarks" / "soak"
report, drawing, measure = (
    scripts.load(f"benchmarks/{name}.py") for name in ("soak/report", "soak/drawing", "measure")
)


def test_a_slope_has_the_standard_error_of_independent_samples():
    rng, times = np.random.default_rng(0), np.arange(600) / 600
    found = [report.slope(times, 5 * times + rng.standard_normal(600)) for _ in range(200)]
    rates, errors = np.transpose(found)
    assert abs(rates.mean() - 5) < 4 * rates.std() / np.sqrt(200)
    assert errors.mean() == pytest.approx(rates.std(), rel=0.2)
    assert report.slope(times[:3], times[:3]) is None


def test_only_caches_of_fixed_size_keep_anything_of_a_dropped_program():
    mesh = jax.make_mesh((2,), ("data",))

    def run(number):  # no two programs have the same shapes
        shapes = [(100 + number, 40), (3, 1000 + 7 * number)]
        place = NamedSharding(mesh, P("data"))
        leaves = [jax.device_put(np.ones((2, *s), np.float32), place) for s in shapes]

        def reduce(leaves):
            return cgx_jax.psum_compressed([x[0] for x in leaves], "data", exchange="xla")

        f = jax.shard_map(reduce, mesh=mesh, in_specs=P("data"), out_specs=P())
        jax.block_until_ready(jax.jit(f)(leaves))

    def of_the_library(kind):
        return str(kind.__module__).startswith("cgx_jax")

    def run_and_drop(numbers):
        for number in numbers:
            run(number)
        jax.clear_caches()
        endless = {}
        found = {id(x): x for x in gc.get_objects() if isinstance(x, functools._lru_cache_wrapper)}
        for cache in found.values():
            if not of_the_library(cache) or not inspect.signature(cache).parameters:
                continue
            if cache.cache_parameters()["maxsize"] is None:
                endless[cache.__qualname__] = cache.cache_info().currsize
            else:
                cache.cache_clear()
        gc.collect()
        return Counter(filter(of_the_library, map(type, gc.get_objects()))), endless

    before = run_and_drop(range(3))
    assert run_and_drop(range(3, 8)) == before


def records(*crcs, share=0.5):
    rows = [(0, crc, share, float(i)) for i, crc in enumerate(crcs)]
    return np.array(rows, report.RECORD)


FOUND = {
    "all alike": ([records(1, 2, 3), records(1, 2, 3)], {"reductions": 3, "mismatches": 0}),
    "one differs": ([records(1, 2, 3), records(1, 9, 3)], {"mismatches": 1, "first_mismatch": 1}),
    "one was killed": ([records(1, 2, 3), records(1, 2)], {"reductions": 2, "mismatches": 0}),
    "over the bound": (
        [records(1, share=1.5), records(1, share=-1)],
        {"checked": 1, "over_bound": 1, "largest_share_of_bound": 1.5},
    ),
    "not a number": ([records(1, share=np.inf)], {"over_bound": 1}),
    "nothing": ([records(), records()], {"reductions": 0, "reductions_per_second": None}),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_the_ranks_wrote_is_compared(name):
    given, expected = FOUND[name]
    found = report.compared(given)
    assert {k: found[k] for k in expected} == expected


def test_a_result_beyond_the_bound_is_seen():
    rng = np.random.default_rng(0)
    for _ in range(20):
        what = drawing.draw(rng, frozenset({"scatter", "gather"}))
        x = [np.stack(rows) for rows in zip(*(what.values(r, 0) for r in range(3)), strict=True)]
        zeros = [np.zeros(s) for s in what.shapes]
        divisor = 3 if what.mean else 1
        exact = [v.astype(np.float64).sum(0) / divisor for v in x]
        assert what.share_of_bound(exact, x, zeros) == 0
        most = [drawing.allowed(v, b, divisor) for v, b in zip(x, zeros, strict=True)]
        off = [y + 2 * m for y, m in zip(exact, most, strict=True)]
        assert what.share_of_bound(off, x, zeros) == pytest.approx(2, rel=1e-3)
        lost = [np.full(s, np.nan) for s in what.shapes]
        assert what.share_of_bound(lost, x, zeros) == np.inf


def soak(folder, *options):
    command = [sys.executable, str(SOAK / "run.py"), "--folder", str(folder), "--pool", "2"]
    return subprocess.run(
        [*command, *options],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


@pytest.mark.slow
@needs_mpi
def test_a_short_soak_is_killed_goes_on_with_fewer_and_leaves_no_process(tmp_path):
    numbers = tmp_path / "soak.jsonl"
    options = ["--phases", "kills", "--hours", "0.006", "--json", numbers]
    done = soak(tmp_path, *map(str, options))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    total, *jobs = measure.rows(numbers)
    assert total["reductions"] > 0
    assert total["checked"] > 0
    assert (total["hangs"], total["failures"], total["mismatches"], total["over_bound"]) == (0,) * 4
    assert [(job["world"], job["outcome"]) for job in jobs[:2]] == [(3, "killed"), (2, "ended")]
    left = [
        process
        for process in Path("/proc").glob("[0-9]*/cmdline")
        if str(tmp_path) in process.read_text(errors="replace")
    ]
    assert not left


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc: run it on Linux")
def test_a_step_is_repeated_by_its_command(tmp_path):
    done = soak(tmp_path, "--repeat", "0:steady:xla:2:7")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "8 reductions" in done.stdout  # feedback has state: from the first step on
