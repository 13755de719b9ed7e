"""PyTorch's own ways to send fewer bytes, over the same shaped links.

    pip install torch
    python benchmarks/torch_ddp.py --world 4 --rate 1gbit

`all_reduce`: torch.distributed's gloo all-reduce of fp32 and of bf16 (cast, reduce, cast back) on
--size bytes per rank. `ddp`: the backward pass of DistributedDataParallel with its fp16, bf16 and
PowerSGD hooks on six linear layers of 2048 x 2048 (100 MB of fp32 gradients). A backward pass
without any communication is timed beside them and subtracted, so only the time that communication
adds is compared. `ratio` is fp32's time divided by the method's time in the same repeat: the median
(and quartiles) over the repeats. `error` is the relative L2 error of the mean gradient of the last
repeat.
"""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import measure

WIDTH, LAYERS = 2048, 6
# PowerSGD's hook waits for one all-reduce inside the callback of another. On gloo's two threads
# several buckets in flight wait for each other forever, so PowerSGD gets a single bucket.
ONE_BUCKET_MB = 400


def main() -> int:
    parser = measure.parser(__doc__, world=4, rate="1gbit", reps=7)
    parser.add_argument("--size", default="100M", help="fp32 bytes per rank (default %(default)s)")
    arguments = parser.parse_args()
    if "RANK" not in os.environ:
        return measure.launch(arguments, [(arguments.world, arguments.rate, {})])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size = measure.size_in_bytes(arguments.size)
    rows = all_reduce(size // 4, arguments.reps) + ddp(arguments.reps)
    if dist.get_rank() == 0:
        for row in rows:
            row.update(world=dist.get_world_size(), links=arguments.rate)
            print(
                f"{row['what']:>10} {row['method']:>10} {row['seconds'] * 1e3:>9.1f} ms"
                f"  {measure.spread(row['ratio'])}  error {row['error']:.1e}"
            )
        measure.write_json(arguments.json, rows)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def timed(function: Callable[[], None]) -> float:
    """Returns the slowest rank's seconds of one call, which all ranks begin together."""
    dist.barrier()
    dist.barrier()  # by now the stragglers of the first barrier have arrived
    start = time.perf_counter()
    function()
    seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def rows_of(
    what: str, methods: dict[str, np.ndarray], nbytes: int, errors: dict[str, float]
) -> list[dict[str, Any]]:
    """Returns a row per method from its seconds per repeat; the first method is the baseline."""
    baseline = next(iter(methods.values()))
    return [
        {
            "what": what,
            "method": method,
            "bytes": nbytes,
            "reps": len(seconds),
            "seconds": float(np.median(seconds)),
            "ratio": measure.quartiles(baseline / seconds),
            "error": errors[method],
        }
        for method, seconds in methods.items()
    ]


def all_reduce(values: int, reps: int) -> list[dict[str, Any]]:
    """Times sums of f32[values], sent in fp32 and in bf16."""
    x = torch.randn(values, generator=torch.Generator().manual_seed(dist.get_rank()))
    result = torch.empty_like(x)

    def reduce(dtype: torch.dtype) -> None:
        sent = x.to(dtype, copy=True)
        dist.all_reduce(sent)
        result.copy_(sent)

    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    seconds: dict[str, list[float]] = {name: [] for name in dtypes}
    results = {}
    for rep in range(-1, reps):  # one round of warm-up
        for name, dtype in dtypes.items():
            took = timed(lambda dtype=dtype: reduce(dtype))
            results[name] = result.clone()
            if rep >= 0:
                seconds[name].append(took)
    arrays = {name: np.array(s) for name, s in seconds.items()}
    return rows_of("all_reduce", arrays, 4 * values, relative(results))


def relative(results: dict[str, torch.Tensor]) -> dict[str, float]:
    """Returns the relative L2 distance of each result from fp32's."""
    exact = results["fp32"]
    return {name: float((r - exact).norm() / exact.norm()) for name, r in results.items()}


def ddp(reps: int) -> list[dict[str, Any]]:
    """Times what communication adds to a backward pass, by hook."""
    hooks: dict[str, tuple[Any, Callable] | None] = {
        "fp32": None,
        "fp16": (None, default_hooks.fp16_compress_hook),
        "bf16": (None, default_hooks.bf16_compress_hook),
    }
    for rank in (1, 2, 4):
        state = powerSGD_hook.PowerSGDState(None, rank, start_powerSGD_iter=2)
        hooks[f"PowerSGD {rank}"] = (state, powerSGD_hook.powerSGD_hook)
    models = {name: model(hook) for name, hook in hooks.items()}
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(8, WIDTH, generator=generator)
    seconds: dict[str, list[float]] = {name: [] for name in hooks}
    results = {}
    for rep in range(-3, reps):  # PowerSGD starts after two exact steps
        alone = models["fp32"]
        with alone.no_sync():
            compute = timed(forward(alone, x).backward)
        for name, wrapped in models.items():
            took = timed(forward(wrapped, x).backward)
            if rep == reps - 1:
                results[name] = torch.cat([p.grad.ravel() for p in wrapped.parameters()])
            if rep >= 0:
                seconds[name].append(max(took - compute, 1e-6))
    arrays = {name: np.array(s) for name, s in seconds.items()}
    return rows_of("ddp", arrays, 4 * results["fp32"].numel(), relative(results))


def model(hook: tuple[Any, Callable] | None) -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    powersgd = hook is not None and hook[0] is not None
    wrapped = DistributedDataParallel(
        torch.nn.Sequential(*layers), bucket_cap_mb=ONE_BUCKET_MB if powersgd else 25
    )
    if hook is not None:
        state, function = hook
        # DDP refuses bf16_compress_hook by its name without NCCL, although gloo reduces bf16.
        wrapped.register_comm_hook(state, lambda state, bucket: function(state, bucket))
    return wrapped


def forward(wrapped: DistributedDataParallel, x: torch.Tensor) -> torch.Tensor:
    wrapped.zero_grad(set_to_none=True)
    return wrapped(x).pow(2).sum()


if __name__ == "__main__":
    sys.exit(main())
