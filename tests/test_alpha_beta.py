"""The model behind the tables of reductions: its bytes and messages, and the fit of both terms."""

import pytest

import scripts
from cgx_jax import Quantize

alpha_beta = scripts.load("benchmarks/alpha_beta.py")

VALUES = 512 * 4096  # a bucket or more in each of 4,096 chunks
# Payloads that a rank sends.
SHARES = {
    "scatter_gather": lambda w: 2 * (w - 1) / w,
    "gather_sum": lambda w: w - 1,
    "ring": lambda w: 2 * (w - 1) / w,
    "tree": lambda w: w.bit_length() - 1,
}


@pytest.mark.parametrize("world", [2, 4, 8, 64, 4096])
@pytest.mark.parametrize("name", SHARES)
def test_bytes_are_the_stated_share_of_a_payload(name, world):
    assert alpha_beta.REDUCTIONS.keys() == SHARES.keys()
    payload = Quantize(4).payload_bytes(VALUES)
    assert alpha_beta.sent(name, VALUES, world) == pytest.approx(SHARES[name](world) * payload)


def test_between_two_ranks_whole_payloads_take_half_the_messages_of_chunks():
    chunks = ("scatter_gather", "ring")
    assert [alpha_beta.messages(r, 2) for r in (*chunks, "gather_sum", "tree")] == [2, 2, 1, 1]
    with pytest.raises(ValueError, match="world=3 is not a power of two"):
        alpha_beta.messages("tree", 3)


@pytest.mark.parametrize(("alpha", "beta"), [(1e-4, 8e-9), (1e-3, 0.0), (0.0, 1e-9)])
def test_both_terms_are_found_again(alpha, beta):
    cells = [
        (name, values, world, alpha_beta.seconds(name, values, world, alpha, beta))
        for name in SHARES
        for values in (1000, 100_000)
        for world in (2, 8)
    ]
    assert alpha_beta.fitted(cells) == pytest.approx((alpha, beta), rel=1e-6, abs=1e-15)


def test_neither_term_is_negative():
    """A link that takes less time the more it sends has a price of 0 per byte."""
    cells = [("ring", values, 4, 1e-3 - 1e-9 * values) for values in (1000, 10_000, 100_000)]
    alpha, beta = alpha_beta.fitted(cells)
    assert alpha > 0
    assert beta == 0
