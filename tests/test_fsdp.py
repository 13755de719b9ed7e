"""A hand-written FSDP loop is compressed both ways by changing the call that gathers."""

import difflib
from pathlib import Path

import jax
import numpy as np

from hlo import collectives

EXACT = Path(__file__).with_name("fsdp_loop.py").read_text()
CHANGES = {
    "import optax\n": """import optax
from cgx_jax import Quantize, all_gather_compressed
""",
    """    gather = functools.partial(lax.all_gather, axis_name="data", tiled=True)
    return jax.tree.map(lambda x, d: gather(x, axis=d), shards, cut)
""": """    how = {"backward": Quantize(4, rotation=True), "tiled": True, "exchange": "xla"}
    return all_gather_compressed(shards, "data", Quantize(8), axis=cut, **how)
""",
}


def changed():
    """Returns the compressed program."""
    program = EXACT
    for old, new in CHANGES.items():
        assert program.count(old) == 1
        program = program.replace(old, new)
    return program


def lines(before, after):
    """Returns how many lines of a program another one changes or adds."""
    each = difflib.ndiff(before.splitlines(), after.splitlines())
    return sum(line.startswith("+ ") for line in each)


def batches(steps):
    """Tokens i32[steps, 16, 33]: each follows from the one before, mostly by one fixed map."""
    rng = np.random.default_rng(0)
    following = rng.permutation(256)
    tokens = rng.integers(256, size=(steps, 16, 33))
    for i in range(1, 33):
        random = rng.random((steps, 16)) < 0.1
        tokens[..., i] = np.where(random, tokens[..., i], following[tokens[..., i - 1]])
    return tokens.astype(np.int32)


def test_a_hand_written_loop_is_compressed_both_ways_by_a_few_lines(no_cache, unoptimized):
    assert lines(EXACT, changed()) <= 8
    tokens, losses, programs = batches(28), {}, {}
    for name, text in (("exact", EXACT), ("compressed", changed())):
        module = {}
        exec(compile(text, f"{name}.py", "exec"), module)
        with jax.numpy_dtype_promotion("standard"):  # as Optax is written
            losses[name], programs[name] = module["train"](tokens)
    assert losses["exact"][-5:].mean() < 0.5 * losses["exact"][0]
    assert np.abs(losses["compressed"] / losses["exact"] - 1).max() < 0.05
    large = {
        name: [(c.op, c.dtype) for c in collectives(program) if c.nbytes > 512]
        for name, program in programs.items()
    }
    # Layers are gathered in both passes and their gradients scattered; the embedding once each. An
    # all-to-all has an operand for each rank.
    wanted = [("all-gather", "u8")] * 3 + [("all-to-all", "u8")] * 2 * 8
    assert sorted(large["compressed"]) == wanted
    assert all(dtype == "f32" for _, dtype in large["exact"])
