"""The README's snippets run, in order, as one program."""

import pathlib
import re

import jax

README = pathlib.Path(__file__).parents[1] / "README.md"


def test_readme_snippets_run(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 4
    namespace = {}
    with jax.numpy_dtype_promotion("standard"):  # as users have it; optax needs it
        for block in blocks:
            exec(compile(block, "README.md", "exec"), namespace)
    assert "1 leaves in 1 fusion buffers" in capsys.readouterr().out
