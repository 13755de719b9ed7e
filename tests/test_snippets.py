"""Every Python block of the README and of the documentation runs.

A block that imports cgx_jax is a complete program and runs as it is. Other blocks are fragments. A
page's fragments run one after the other, in the namespace of the program before them or of the
page's row in `FRAGMENTS`. A new block runs too. If it needs other names, it needs a row in
`FRAGMENTS`; if it cannot run here, a row in `NOT_HERE`.
"""

import dataclasses
import re
import sys
import types
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax.tuning import sweep
from processes import finish, free_port, start

ROOT = Path(__file__).parents[1]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
}
PROCESSES = "docs/quickstart/processes.md"
# Compiled models, and calls that other tests make, which the quick tests leave out.
COSTLY = {
    "quickstart": ("equinox", "flax_linen", "flax_nnx", "fsdp", "pmap", "shard_map"),
    "reference": ("calls", "compressors", "exchanges", "reductions", "testing", "transforms"),
}
COSTLY = [f"docs/{folder}/{name}.md" for folder, names in COSTLY.items() for name in names]

# Goes on with the program of the README, which runs there.
GOES_ON = "docs/calls.md"
# Blocks that cannot run in this process: a page, a phrase of the block, and why.
NOT_HERE = {(PROCESSES, "jax.distributed.initialize"): "two processes, which a test below starts"}

# Names that every page of fragments takes for granted.
COMMON = """
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax import Rule, Rules
from cgx_jax.compressors import DGC, TopK

mesh = Mesh(np.array(jax.devices()), ("data",))
params = {"embed": jnp.ones((64, 32)), "w": jnp.ones((32, 64))}
batch = jnp.ones((16, 32))


def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch @ params["w"]) @ params["embed"] - batch) ** 2)
"""

# Names in scope where a step reduces by an optimizer.
IN_A_STEP = """
tx = optax.chain(cgx_jax.sync_gradients("data", policy), optax.sgd(0.1))
opt_state = tx.init(params)
varying = jax.tree.map(lambda p: jax.lax.pcast(p, "data", to="varying"), params)
"""


@dataclasses.dataclass(frozen=True)
class Fragments:
    """What a page's fragments need besides `COMMON`; a phrase identifies the block it occurs in.

    `before` runs first. `inside` maps blocks that are a part of a step to (axis, code that defines
    what is in scope); these blocks are traced. `after` maps blocks to code that uses what they
    define.
    """

    before: str = ""
    inside: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    after: Mapping[str, str] = dataclasses.field(default_factory=dict)


FRAGMENTS = {
    GOES_ON: Fragments(
        before="\n".join(re.findall(r"^```python\n(.*?)^```$", PAGES["README.md"], re.S | re.M)),
        after={
            "cgx_jax.plan_table(plan)": """
assert "1 leaves in 1 fusion buffers" in cgx_jax.plan_table(plan)
step(params, opt_state, x, y)
"""
        },
    ),
    "docs/choosing.md": Fragments(
        before="step, x, y = None, batch, batch",
        after={"def compare(sync)": "compare(cgx_jax.sync_gradients)"},
    ),
    "docs/policy.md": Fragments(
        after={
            "writer.add_scalar": """
class Writer:  # the one call of TensorBoard's and of W&B's loggers that is used
    def __init__(self):
        self.seen = {}

    def add_scalar(self, name, value, number):
        self.seen[name] = float(value)

    def log(self, values, step):
        self.seen |= values


opt_state = cgx_jax.sync_gradients("data", policy, mesh=mesh).init(params)
writer = Writer()
to_tensorboard(writer, 0, opt_state)
assert {"cgx/bits_per_value", "cgx/skipped"} < set(writer.seen) and "cgx/refresh" not in writer.seen
""",
            "run.log(": """
to_wandb(writer, 0, opt_state)
assert writer.seen["cgx/refresh"] == "warmup"
""",
        }
    ),
    "docs/reliability.md": Fragments(
        before="""
import os
import traceback


def train():
    pass


def step(state, batch):
    return state, jnp.zeros(())


state = None
"""
    ),
    "docs/training_loops.md": Fragments(
        before="""
policy, optimizer = cgx_jax.Quantize(bits=4), optax.sgd(0.1)


def mean_loss(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)
""",
        inside={
            "def add(total, batch)": (
                "data",
                IN_A_STEP
                + """
k = 2
micro = jax.lax.pcast(jnp.stack([batch] * k), "data", to="varying")
""",
            ),
            "lambda t, g: t + g / k": (
                "data",
                IN_A_STEP
                + """
k, i = 4, jnp.int32(0)
grads = jax.grad(loss_fn)(varying, batch)
total = jax.tree.map(lambda p: jnp.zeros_like(p)[None], varying)
""",
            ),
            "cgx_jax.scan_layers": (
                "data",
                """
def block(x, layer):
    return x + jnp.tanh(x @ layer["kernel"])


def loss(x):
    return jnp.mean(x**2)


key = jax.random.key(0)
x = jax.lax.pcast(jnp.ones((2, 64)), "data", to="varying")
shards = {"kernel": jax.lax.pcast(jnp.ones((3, 8, 64)), "data", to="varying")}
""",
            ),
            "dynamic_scale.value_and_grad": (
                "batch",
                """
from flax.training.dynamic_scale import DynamicScale

dynamic_scale, loss_of_batch = DynamicScale(), loss_fn
params = jax.tree.map(lambda p: jax.lax.pcast(p, "batch", to="varying"), params)


def loss_fn(params):
    return loss_of_batch(params, batch), ()
""",
            ),
        },
        after={
            "def train_step": """
opt_state = optimizer.init(params)
jax.eval_shape(train_step, params, opt_state, state, batch)
"""
        },
    ),
    "docs/tuner.md": Fragments(
        before="""
def step(params, opt_state):
    return params, opt_state
"""
    ),
}


def blocks(page):
    """Returns (line, code) of every Python block of a page."""
    text = PAGES[page]
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [(text.count("\n", 0, match.start(1)), match[1]) for match in found]


def diffs(page):
    """Yields (new lines, old lines) of every diff of a page, without indentation."""
    for diff in re.findall(r"^```diff\n(.*?)^```$", PAGES[page], re.DOTALL | re.MULTILINE):
        lines = [(line[0], line[1:].strip()) for line in diff.splitlines()]
        yield tuple([line for sign, line in lines if sign == wanted] for wanted in "+-")


def is_program(code):
    return re.search(r"^import cgx_jax$", code, re.MULTILINE) is not None


def is_left_out(page, code):
    return any(where == page and phrase in code for where, phrase in NOT_HERE)


def entry(table, code):
    """Returns a table's value for the phrase that occurs in a block, or None."""
    return next((value for phrase, value in table.items() if phrase in code), None)


def runs(page):
    return page != "README.md" and any(not is_left_out(page, code) for _, code in blocks(page))


def execute(code, namespace, page, line=0):
    """Runs code from a line of a page; tracebacks show that line."""
    exec(compile("\n" * line + code, page, "exec"), namespace)


def trace(code, namespace, page, line, axis, scope):
    """Traces a block as a part of a step on every rank of `axis`; its names are then dropped."""
    namespace = dict(namespace)

    def step(unused):
        execute(scope, namespace, page)
        execute(code, namespace, page, line)
        return unused

    mesh = Mesh(np.array(jax.devices()), (axis,))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P())
    jax.eval_shape(mapped, jnp.zeros(()))


# Collectives of a program that do not wait for each other: see conftest.
@pytest.mark.usefixtures("no_cache", "unoptimized")
@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=pytest.mark.slow if p in COSTLY else ()) for p in PAGES if runs(p)],
)
def test_a_page_runs(page, monkeypatch, following):
    # The real function would change this process for all later tests; few rounds tune as well.
    patches = [(cgx_jax, "keep_memory", lambda: True)]
    patches += [(sweep, "ROUNDS", range(3, 6)), (sweep, "CODEC_ROUNDS", 3)]
    for patch in patches:
        monkeypatch.setattr(*patch)

    def namespace():
        # Classes look for the module that they are defined in.
        module = types.ModuleType("snippet")
        sys.modules["snippet"] = module
        return vars(module)

    known = FRAGMENTS.get(page, Fragments())
    # Promotion as users have it; optax needs it. The mesh that a page sets ends with the page.
    with jax.numpy_dtype_promotion("standard"), jax.set_mesh(None):
        names = namespace()
        execute(COMMON + known.before, names, page)
        for line, code in blocks(page):
            if is_left_out(page, code):
                continue
            if is_program(code):
                names = namespace()
            inside = entry(known.inside, code)
            if inside is None:
                execute(code, names, page, line)
                check_compiled_once(page, names)
            else:
                trace(code, names, page, line, *inside)
            execute(entry(known.after, code) or "", names, page)


def check_compiled_once(page, names):
    """Fails if a page's step met operands that lie elsewhere than those of its other calls."""
    for name in {"step", "train_step", "wide_step"} & set(names):
        if hasattr(names[name], "_cache_size") and page != "docs/quickstart/pmap.md":
            assert names[name]._cache_size() <= 1, f"{page}: {name} was compiled several times"


@pytest.mark.parametrize("page", PAGES)
def test_no_block_is_overlooked(page):
    fences = re.findall(r"^[ \t]*(?:```|~~~)[ \t]*\{?\.?(?:py|Py)", PAGES[page], re.MULTILINE)
    assert len(fences) == len(blocks(page)), "begin a Python block with ```python at column 0"


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/reference/")])
def test_every_name_of_a_reference_page_has_an_example(page):
    shown = "\n".join(code for _, code in blocks(page))
    paths = re.findall(r"^::: (.*)$", PAGES[page], re.MULTILINE)
    names = [path.rpartition(".")[2] for path in paths]
    assert [name for name in names if not re.search(rf"\b{name}\b", shown)] == []


def test_each_row_of_the_tables_means_one_block():
    rows = list(NOT_HERE)
    for page, known in FRAGMENTS.items():
        assert runs(page), f"{page} has no fragments any more"
        rows += [(page, phrase) for phrase in (*known.inside, *known.after)]
    for page, phrase in rows:
        assert sum(phrase in code for _, code in blocks(page)) == 1, (page, phrase)


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/quickstart/")])
def test_the_diffs_of_a_quickstart_lead_to_its_program_or_begin_there(page):
    program = {line.strip() for line in blocks(page)[0][1].splitlines()}
    assert list(diffs(page))
    for new, old in diffs(page):
        assert program.issuperset(new) or program.issuperset(old)


def test_no_loop_of_flax_changes_more_than_three_lines():
    changed = [max(map(len, both)) for both in diffs("docs/flax_examples.md")]
    assert changed
    assert max(changed) <= 3


@pytest.mark.slow
def test_two_processes_train_together(tmp_path):
    ((_, code),) = blocks(PROCESSES)
    file = tmp_path / "train.py"
    file.write_text(code)
    address = f"127.0.0.1:{free_port()}"
    ranks = [start([sys.executable, str(file), address, str(rank)]) for rank in range(2)]
    (first, out, error), (second, *_) = (finish(rank, 240) for rank in ranks)
    assert (first, second) == (0, 0), error
    assert "at last" in out
