"""Every benchmark runs, at the least that it can measure."""

import os
import shlex
import subprocess
import sys

import pytest

from cgx_jax.commands import rig
from scripts import ROOT

COMMANDS = {
    "accuracy/run.py": "--task language --seeds 0 --steps 2 --configs 'exact;4 bits' --out {out}",
    "adaptive.py": "--rounds 2 --train 6 --layers 1",
    "algorithms.py": "--rate none --worlds 2 --sizes 4k --seconds 0.1 --reps 5",
    "all_reduce.py": "--rate 1gbit --world 2 --methods psum,xla,mpi --sizes 4k --reps 2",
    "auto.py": "--rates 1gbit --worlds 2 --sizes 4k --seconds 0.1",
    "auto_choice.py": "--rates 1gbit --worlds 2 --sizes 4k --tune 1 --seconds 0.1",
    "compile_time.py": "--models 5 --reps 1",
    "critical_phases.py": "--steps 8 --seeds 1",
    "delayed.py": "--rate 1gbit --every 2 --reps 1 --ways nothing",
    "fsdp.py": "--seeds 2 --steps 1",
    "fsdp_speed.py": "--rates 1gbit --worlds 2 --reps 1",
    "in_flight.py": "--delays 0 --reps 2",
    "levels.py": "--rates 1gbit --sizes 4k --reps 2",
    "native_codes.py": "--task recommender --methods 'TopK 1 %, feedback' --reps 1",
    "nonfinite.py": "--task recommender --exchanges xla --reps 1",
    "overlap.py": "--task recommender --world 2 --links 1gbit --reps 1",
    "power_sgd.py": "--leaves 1 --side 64 --reps 1",
    "predict.py": "",
    "segments.py": "--world 2 --rate 1gbit --sizes 64k --segments 32k --windows 2 --reps 1",
    "small_leaves.py": "--worlds 2 --rates 1gbit --reps 2",
    "suite/diloco.py": "--task language --seeds 0 --steps 8 --configs 'DiLoCo, every 8' "
    "--out {out}",
    "suite/quality.py": "--task language --seeds 0 --steps 2 --configs 'exact;bf16' --out {out}",
    "suite/speed.py": "--task recommender --world 2 --links 1gbit --methods 'exact;8 bits' "
    "--reps 1",
    "suite/tuned.py": "--task language --seeds 0 --steps 2 --configs exact --out {out}",
    "time_to_loss.py": "--steps 5 --every 5 --few 5",
    "training_step.py": "--cases 2:unlimited:1 --reps 1",
    "tuner.py": "--rates 1gbit --worlds 2 --trees '25 MB, 160 leaves' --finalists 1 --final 1",
}
OTHERS = {
    "accuracy/summary.py": "reads results: test_tables.py runs it",
    "accuracy/where_lost.py": "trains a task to its end",
    "codec.py": "`make bench` builds what it times",
    "kills.py": "trains for an hour",
    "soak/run.py": "test_soak.py runs it",
    "soak/worker.py": "a rank of the soak",
    "suite/findings.py": "reads results: test_tables.py runs it",
    "tables.py": "reads results: test_tables.py runs it",
    "torch_ddp.py": "needs PyTorch",
}


def test_every_benchmark_is_known():
    files = (ROOT / "benchmarks").rglob("*.py")
    found = {str(f.relative_to(ROOT / "benchmarks")) for f in files if "__main__" in f.read_text()}
    assert found == {*COMMANDS, *OTHERS}


@pytest.mark.slow
@pytest.mark.skipif(rig.missing() is not None, reason=str(rig.missing()))
@pytest.mark.parametrize("script", COMMANDS)
def test_a_benchmark_runs(script, tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / script)]
    command += shlex.split(COMMANDS[script].format(out=tmp_path))
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    # A benchmark chooses its own devices.
    own = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    done = subprocess.run(
        command,
        env=own | {"PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout
