"""The examples of the reference run, page by page, and every name has one."""

import re
from pathlib import Path

import jax
import pytest

import cgx_jax
from cgx_jax.tuning import sweep

REFERENCE = Path(__file__).parents[1] / "docs" / "reference"
PAGES = sorted(page.name for page in REFERENCE.glob("*.md"))
# Their calls are those of the README and of other tests, so the quick tests leave them out.
COSTLY = (
    "calls.md",
    "compressors.md",
    "exchanges.md",
    "reductions.md",
    "testing.md",
    "transforms.md",
)

# Some examples have collectives that do not wait for each other.
pytestmark = pytest.mark.usefixtures("no_cache")


def blocks(page):
    """Returns a page's blocks of code, padded with empty lines so that line numbers match."""
    text = (REFERENCE / page).read_text()
    found = re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return ["\n" * text.count("\n", 0, block.start(1)) + block[1] for block in found]


@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=pytest.mark.slow if p in COSTLY else ()) for p in PAGES]
)
def test_the_examples_of_a_page_run(page, monkeypatch, following):
    # The real function would change this process for all later tests; few rounds tune as well.
    patches = [(cgx_jax, "keep_memory", lambda: True)]
    patches += [(sweep, "ROUNDS", range(3, 6)), (sweep, "CODEC_ROUNDS", 3)]
    for patch in patches:
        monkeypatch.setattr(*patch)
    namespace = {}
    with jax.numpy_dtype_promotion("standard"):  # as users have it; optax needs it
        for block in blocks(page):
            exec(compile(block, REFERENCE / page, "exec"), namespace)


@pytest.mark.parametrize("page", PAGES)
def test_every_name_of_a_page_has_an_example(page):
    text = (REFERENCE / page).read_text()
    shown = "\n".join(blocks(page))
    names = [path.rpartition(".")[2] for path in re.findall(r"^::: (.*)$", text, re.MULTILINE)]
    assert [name for name in names if not re.search(rf"\b{name}\b", shown)] == []
