"""Which folder of the native sources may include which other folder."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1] / "xla_ffi"
MAY_INCLUDE = {
    "format": set(),
    "cpu": {"format"},
    "cuda": {"format"},
    "schedule": {"format"},
    "messages": {"format", "schedule", "cpu"},
    "mpi": {"messages"},
    "nccl": {"format", "schedule", "cuda"},
    "handlers": {"format", "schedule", "cpu", "cuda", "messages", "mpi", "nccl", "xla"},
}


def test_folders_include_only_what_lies_below_them():
    assert {p.name for p in ROOT.iterdir()} == set(MAY_INCLUDE)
    for folder, others in MAY_INCLUDE.items():
        for source in (ROOT / folder).iterdir():
            included = set(re.findall(r'#include "(\w+)/', source.read_text()))
            assert included <= others | {folder}, source
