"""How much memory compiled programs leave behind once dropped, with this library and without.

    python benchmarks/soak/programs.py --json benchmarks/results/soak_programs.jsonl

A program reduces two leaves, whose shapes no other program has, between 2 simulated devices, by
ScatterGather at 4 bits over the exchange "xla". It is compiled, run once and dropped. Three kinds
of process do this with the same shapes, one after the other, in `--rounds` rounds:

    library    traces a call of `psum_compressed`, compiles and runs it
    exported   compiles and runs the same programs; all were exported before the first sample, so
               the library's Python takes no part
    psum       as "library", with `lax.psum` in place of the call

Memory is sampled every 10 programs, after JAX's caches are cleared and malloc has given back what
is free. `slope` is what a program leaves behind, in KB, and its standard error, over the last third
of the samples. `filling` is the same over the rest, while the library's caches, of up to 1,024
entries each, fill up. `objects` counts the library's own objects that are alive at the end, by
class. `caches` counts the entries of its functions' caches.
"""

import argparse
import ctypes
import functools
import gc
import inspect
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

WORLD = 2
EVERY = 10  # programs between two samples
KINDS = ("library", "exported", "psum")


def parse_arguments() -> argparse.Namespace:
    import measure

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", type=int, default=1800, help="a process (1800)")
    parser.add_argument("--rounds", type=int, default=1, help="of the three kinds (1)")
    measure.add_json_option(parser)
    return parser.parse_args()


def main() -> int:
    import measure

    arguments = parse_arguments()
    rows = []
    for number in range(arguments.rounds):
        for kind in KINDS:
            row = {"round": number, **child(kind, arguments.programs)}
            rows.append(row)
            (early, _), (late, error) = row["filling"], row["slope"]
            print(
                f"{kind:<9} {row['programs']} programs: {early:.1f} KB each, then {late:.1f} ±"
                f" {error:.1f}; {sum(row['objects'].values())} objects, {row['caches']} cached",
                flush=True,
            )
    measure.write_json(arguments.json, rows)
    return 0


def child(kind: str, programs: int) -> Any:
    """Runs a process of this kind; returns what it prints."""
    flags = f"--xla_force_host_platform_device_count={WORLD}"
    done = subprocess.run(
        [sys.executable, __file__, "--child", kind, str(programs)],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout)


def leaves(number: int) -> list[Any]:
    """Returns the leaves of all ranks for a program; no two programs have the same shapes."""
    import jax

    mesh = jax.make_mesh((WORLD,), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    shapes = [(100 + number, 40), (3, 1000 + 7 * number)]
    return [jax.device_put(np.ones((WORLD, *shape), np.float32), sharding) for shape in shapes]


def program(kind: str) -> Any:
    import jax
    from jax import lax
    from jax.sharding import PartitionSpec as P

    import cgx_jax

    mesh = jax.make_mesh((WORLD,), ("data",))

    def reduce(leaves: list[Any]) -> Any:
        own = [x[0] for x in leaves]
        if kind == "psum":
            return lax.psum(own, "data")
        return cgx_jax.psum_compressed(own, "data", cgx_jax.Quantize(4), exchange="xla")

    # A function that JAX has not seen, so that only JAX's own caches keep the last one.
    mapped = jax.shard_map(
        lambda leaves: reduce(leaves), mesh=mesh, in_specs=P("data"), out_specs=P()
    )
    return jax.jit(mapped)


def run(kind: str, programs: int) -> dict[str, Any]:
    import jax

    import cgx_jax
    import report

    native = cgx_jax.kernels.native.module()
    targets = native.handlers() if native is not None else {}
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in targets]
    exported = []
    if kind == "exported":
        for number in range(programs):
            export = jax.export.export(program(kind), disabled_checks=checks)
            exported.append(export(leaves(number)))
    samples: list[tuple[int, float]] = []
    for number in range(programs):
        made = jax.jit(exported[number].call) if exported else program(kind)
        jax.block_until_ready(made(leaves(number)))
        del made
        if number % EVERY == EVERY - 1:
            samples.append((number + 1, resident_kb()))
    early, late = np.split(np.array(samples), [2 * len(samples) // 3])
    return {
        "kind": kind,
        "programs": programs,
        "filling": report.slope(early[:, 0], early[:, 1]),
        "slope": report.slope(late[:, 0], late[:, 1]),
        "objects": alive(),
        "caches": sum(x.cache_info().currsize for x in caches()),
    }


def resident_kb() -> float:
    import jax

    jax.clear_caches()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") / 1024


def alive() -> dict[str, int]:
    """Counts the library's objects, by class, that the garbage collector knows; no classes."""
    kinds = map(type, gc.get_objects())
    ours = (c for c in kinds if str(c.__module__).startswith("cgx_jax"))
    return dict(Counter(f"{c.__module__}.{c.__qualname__}" for c in ours).most_common())


def caches() -> list[Any]:
    """Returns the caches of the library's functions that take arguments."""
    wrappers = {id(x): x for x in gc.get_objects() if isinstance(x, functools._lru_cache_wrapper)}
    ours = (x for x in wrappers.values() if str(x.__module__).startswith("cgx_jax"))
    return [x for x in ours if inspect.signature(x).parameters]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(run(sys.argv[2], int(sys.argv[3]))))
    else:
        sys.exit(main())
