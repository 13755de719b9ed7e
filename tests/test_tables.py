"""The documents' tables and the files of results that they are made of."""

import pytest

import scripts

tables, measure = (scripts.load(f"benchmarks/{name}.py") for name in ("tables", "measure"))
accuracy = scripts.load("benchmarks/accuracy/summary.py")
suite = scripts.load("benchmarks/suite/findings.py")


@pytest.mark.parametrize(
    ("path", "module"),
    [(path, module) for module in (tables, accuracy, suite) for path in module.TEXTS],
    ids=lambda x: getattr(x, "name", ""),
)
@pytest.mark.every_combination
def test_the_documents_show_what_the_results_say(path, module):
    filled = getattr(module, "tables", module).filled(path.read_text(), module.TABLES)
    assert "".join(filled) == path.read_text()


def test_runs_are_read_as_they_were_written(tmp_path):
    runs = [
        {
            "command": "a",
            "machine": {"cores": 2},
            "rows": [{"seconds": [0.5, 1e-9]}, {"run": 1, "of": 2}],
        },
        {"world": 2, "rows": []},
    ]
    file = tmp_path / "folder" / "results.jsonl"
    measure.write(file, runs[:1])
    measure.add_run(file, [], world=2)
    assert measure.read(file) == runs
    assert measure.rows(file) == runs[0]["rows"]
    measure.write(file, [{"rows": [{"seconds": 1 / 3, "reps": 12345678901}]}])
    assert file.read_text() == '{"run": {}}\n{"seconds": 0.333333333, "reps": 12345678901}\n'
