"""Losses and outputs that nobody wrote: each equals plain jit, or is refused."""

import collections

import pytest

import zoo

CHUNK = 15


@pytest.mark.parametrize(
    "start",
    [20_000, *(pytest.param(s, marks=pytest.mark.slow) for s in range(20_015, 20_075, CHUNK))],
)
def test_a_random_program_equals_plain_jit_or_is_refused(start):
    kinds = collections.Counter()
    for seed in range(start, start + CHUNK):
        kind, result = zoo.run(seed)
        kinds[kind] += 1
        if kind == "accepted":
            assert result <= zoo.TOLERANCE, f"seed {seed}: {zoo.Program(seed)}"
    assert min(kinds["accepted"], kinds["refused"]) > 0
