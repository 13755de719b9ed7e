"""The documents' tables and the files of results that they are made of."""

import pytest

import scripts

tables, measure = (scripts.load(f"benchmarks/{name}.py") for name in ("tables", "measure"))
accuracy = scripts.load("benchmarks/accuracy/summary.py")


@pytest.mark.parametrize("path", tables.TEXTS, ids=lambda path: path.name)
def test_the_documents_show_what_the_results_say(path):
    assert "".join(tables.filled(path.read_text())) == path.read_text()


@pytest.mark.parametrize("path", accuracy.TEXTS, ids=lambda path: path.name)
def test_the_documents_show_what_the_runs_of_accuracy_say(path):
    filled = accuracy.tables.filled(path.read_text(), accuracy.TABLES)
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
