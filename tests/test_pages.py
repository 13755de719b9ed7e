"""Messages and names that pages quote are in the source."""

import ast
import functools
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


@functools.cache
def said():
    """Returns every text of the package, without f-strings' values, and of the native modules."""
    texts = []
    for path in (ROOT / "cgx_jax").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = node.values
                texts.append(
                    "".join(p.value if isinstance(p, ast.Constant) else "\0" for p in parts)
                )
    for path in (ROOT / "xla_ffi").rglob("*.cc"):
        texts.append(re.sub(r'"\s*"', "", path.read_text()))
    return texts


def quoted():
    text = (DOCS / "troubleshooting.md").read_text().partition("## No message")[0]
    return re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)


def test_messages_are_quoted():
    assert len(quoted()) > 20


@pytest.mark.parametrize("message", quoted())
def test_a_quoted_message_is_one_of_the_package(message):
    parts = [part.strip() for part in message.split("…")]
    assert any(all(part in text for part in parts) for text in said())


def names(page):
    """The names of `cgx_jax` that a page mentions."""
    return sorted(set(re.findall(r"\bcgx_jax(?:\.[A-Za-z_]\w*)+", (DOCS / page).read_text())))


@pytest.mark.parametrize("page", ["migrating.md", "troubleshooting.md", "index.md"])
def test_names_exist(page):
    for name in names(page):
        value = importlib.import_module("cgx_jax")
        for part in name.split(".")[1:]:
            value = getattr(value, part)
