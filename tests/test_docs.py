"""Every link between documents leads to a file, and to an existing heading if it names one."""

import pathlib
import re
import types

import pytest

import scripts

ROOT = pathlib.Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def anchors(text):
    """The headings, as GitHub names them."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def links(text):
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    for link in links(document.read_text()):
        if re.match(r"https?://", link):
            continue
        file, _, anchor = link.partition("#")
        target = (document.parent / file).resolve() if file else document
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target.read_text()), link


def test_the_manual_stays_short():
    """The design and the measurements are not the manual. Code and diffs are not words."""
    manual = [x for x in ROOT.glob("docs/**/*.md") if "measurements" not in x.parts]
    pages = {x.name: x.read_text() for x in manual if x.name != "design.md"}
    assert {name: n for name, x in pages.items() if (n := len(x.split())) > 2000} == {}
    prose = (re.sub(r"```.*?```|^    .*?$", "", x, flags=re.S | re.M) for x in pages.values())
    assert sum(len(x.split()) for x in prose) <= 25_000


def page(uri):
    """Returns what mkdocs passes to a hook for a page."""
    return types.SimpleNamespace(file=types.SimpleNamespace(src_uri=uri))


def test_the_site_names_files_that_are_no_pages():
    hook = scripts.load("docs/site_links.py")
    text = "see [the loop](../examples/02_jit.py), [README.md](../README.md#install), [a](b.md)"
    named = "see the loop (`examples/02_jit.py`), README.md, [a](b.md)"
    assert hook.on_page_markdown(text, page=page("calls.md")) == named
    text = "see [02_jit.py](../../examples/02_jit.py), [loops](../training_loops.md#plain-jit)"
    named = "see 02_jit.py (`examples/02_jit.py`), [loops](../training_loops.md#plain-jit)"
    assert hook.on_page_markdown(text, page=page("quickstart/jit.md")) == named


def test_links_and_anchors_are_found():
    assert links("see [a](b.md#c-d), not `[x](y)`") == ["b.md#c-d"]
    assert anchors("# One\n\n## `psum` over 2 ranks, (fast)\n") == {"one", "psum-over-2-ranks-fast"}
