"""Trains the suite's tasks by every method, on 4 simulated ranks.

    python benchmarks/suite/quality.py                  # all tasks, methods and seeds
    python benchmarks/suite/quality.py --task words --seeds 0 --configs "exact;bf16"

All methods of a seed start from the same parameters and see the same batches. The mean of 4
simulated ranks is bit for bit that of 4 machines, so the load of this machine changes nothing.
Results are written after every run. Runs whose results are already in the file are skipped, unless
--again is given. Needs the packages of the extra `accuracy`.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "accuracy"))

import run
from methods import METHODS
from models import MODELS

RESULTS = run.RESULTS.parent / "suite"

if __name__ == "__main__":
    sys.exit(run.main(__doc__, MODELS, METHODS, RESULTS))
