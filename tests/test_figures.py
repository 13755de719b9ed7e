"""The figures of the documents: drawn by docs/figures.py, from the numbers of the tables."""

import pathlib
import re
import xml.etree.ElementTree as ET

import pytest

import scripts

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "figures"
DOCUMENTS = [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]


def texts(file):
    return [x.text for x in ET.parse(file).getroot().iter() if x.tag.endswith("}text")]


@pytest.fixture(scope="module")
def figures():
    pytest.importorskip("matplotlib", reason="pip install matplotlib")
    return scripts.load("docs/figures.py")


def test_the_committed_figures_say_what_the_script_draws(figures, tmp_path):
    figures.write(tmp_path)
    drawn = {file.name: texts(file) for file in tmp_path.glob("*.svg")}
    assert drawn == {file.name: texts(file) for file in FOLDER.glob("*.svg")}


def test_speeds_are_those_of_the_table(figures):
    page = (ROOT / "docs" / "measurements" / "all_reduce.md").read_text()
    table = re.search(r"table:all_reduce -->(.*?)<!-- end", page, re.S)
    cells = [line.strip("| ").split(" | ") for line in table[1].splitlines() if "|" in line]
    column, body = cells[0].index("25 MB"), {tuple(row[:3]): row for row in cells[2:]}
    for method in ("mpi", "xla"):
        for rate in figures.RATES:
            row = body[figures.link(rate), str(figures.WORLD), f'`"{method}"`']
            assert f"{figures.speeds()[rate, method]:.1f}" == row[column]


def test_every_figure_is_in_a_document():
    shown = {n for d in DOCUMENTS for n in re.findall(r"figures/(\w+\.svg)\)", d.read_text())}
    assert shown == {file.name for file in FOLDER.glob("*.svg")}
