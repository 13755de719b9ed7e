"""Problems for the solvers of bits per leaf."""

import numpy as np

from cgx_jax import Quantize
from cgx_jax.policies.solvers import Problem

BITS = tuple(range(1, 9))


def payload(values, bits):
    """Returns the bytes of each leaf at each width; 32 means exact."""
    return np.array(
        [[4 * v if b == 32 else Quantize(b).wire_bits(int(v)) // 8 for b in bits] for v in values],
        np.int64,
    ).reshape(len(values), len(bits))


def problem(leaves, seed=0, bits=BITS):
    """Log-normal sizes and scales; an error of about 4**-bits, so not quite monotone in size."""
    rng = np.random.default_rng(seed)
    values = np.exp(rng.normal(9, 1.5, leaves)).astype(np.int64)
    norm = np.sqrt(values) * np.exp(rng.normal(-6, 1, leaves))
    steps = np.where(np.array(bits) == 32, 0.0, 4.0 ** -np.array(bits, float))
    error = np.outer(norm**2, steps) * np.exp(rng.normal(0, 0.1, (leaves, len(bits))))
    return Problem(values, norm, bits, payload(values, bits), error)


def uniform(p, bits):
    return np.full(len(p.values), np.flatnonzero(p.bits == bits)[0])
