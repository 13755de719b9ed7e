"""Trains the suite's tasks by DiLoCo, as quality.py does by methods that reduce in every step.

    python benchmarks/suite/diloco.py --task images language recommender segmentation

"exact" is data parallel. All methods take as many steps. What the workers have learned after the
last round is lost.
"""

import sys

from methods import DILOCO
from models import MODELS
from quality import RESULTS, run

if __name__ == "__main__":
    sys.exit(run.main(__doc__, MODELS, DILOCO, RESULTS / "diloco"))
