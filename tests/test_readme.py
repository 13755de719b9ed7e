"""The snippets of the README and of docs/calls.md run, in order, as one program."""

import pathlib
import re

import jax

ROOT = pathlib.Path(__file__).parents[1]


def test_readme_snippets_run(capsys):
    text = (ROOT / "README.md").read_text() + (ROOT / "docs" / "calls.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 3
    namespace = {}
    with jax.numpy_dtype_promotion("standard"):  # as users have it; optax needs it
        for block in blocks:
            exec(compile(block, "README.md", "exec"), namespace)
        again = namespace["params"], namespace["opt_state"], namespace["x"], namespace["y"]
        namespace["step"](*again)
    assert namespace["step"]._cache_size() == 1
    assert "1 leaves in 1 fusion buffers" in capsys.readouterr().out
