"""Losses and outputs that nobody wrote: each equals plain jit, or is refused."""

import collections

import pytest

import zoo


@pytest.mark.parametrize(
    ("start", "count"),
    [
        (20_000, 4),
        *(pytest.param(s, 15, marks=pytest.mark.slow) for s in range(20_004, 20_075, 15)),
    ],
)
def test_a_random_program_equals_plain_jit_or_is_refused(start, count):
    kinds = collections.Counter()
    for seed in range(start, start + count):
        kind, result = zoo.run(seed)
        kinds[kind] += 1
        if kind == "accepted":
            assert result <= zoo.TOLERANCE, f"seed {seed}: {zoo.Program(seed)}"
    assert min(kinds["accepted"], kinds["refused"]) > 0
