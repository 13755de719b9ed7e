"""Trains the suite's tasks by DiLoCo, as quality.py does by methods that reduce in every step.

    python benchmarks/suite/diloco.py --task images language recommender segmentation
    python benchmarks/suite/diloco.py rates --seeds 9    # chooses inner learning rates

"exact" is data parallel. All methods take as many steps. What the workers have learned after the
last round is lost. "rates" trains exactly, by data parallel and by DiLoCo, with multiples of each
task's learning rate. The seed is none of those that are compared.
"""

import sys

from methods import DILOCO, RATES
from models import MODELS
from quality import RESULTS, run

if __name__ == "__main__":
    if sys.argv[1:2] == ["rates"]:
        del sys.argv[1]
        sys.exit(run.main(__doc__, MODELS, RATES, RESULTS / "diloco_rate"))
    sys.exit(run.main(__doc__, MODELS, DILOCO, RESULTS / "diloco"))
