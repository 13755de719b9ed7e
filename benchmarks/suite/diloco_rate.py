"""Trains the suite's tasks by exact DiLoCo with several inner learning rates, to choose one.

    python benchmarks/suite/diloco_rate.py --seeds 9

The rates are multiples of each task's own. The seed is none of those that diloco.py compares.
"""

import sys

from methods import RATES
from models import MODELS
from quality import RESULTS, run

if __name__ == "__main__":
    sys.exit(run.main(__doc__, MODELS, RATES, RESULTS / "diloco_rate"))
