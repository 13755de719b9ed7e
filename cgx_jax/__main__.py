"""Measures, tunes and examines a cgx_jax installation, and compares methods.

    python -m cgx_jax bench --devices 8 --png sweep.png
    python -m cgx_jax tune --out profile.json
    python -m cgx_jax compare train --devices 8 --png compare.png
    python -m cgx_jax doctor

`--devices` simulates ranks in this process. `bench --link 1gbit` starts two processes with a slow
link between them. To measure across your own processes, start the command once per rank with
`--distributed`: srun python -m cgx_jax tune --distributed --out profile.json
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from cgx_jax._version import __version__
from cgx_jax.choice import auto
from cgx_jax.choice.profile import ONE_SHOT, Profile
from cgx_jax.commands import bench, compare, doctor, rig, trial
from cgx_jax.exchanges.table import EXCHANGES
from cgx_jax.host import agreement, files
from cgx_jax.host.console import Column, table_lines
from cgx_jax.tuning import sweep
from cgx_jax.tuning.link_timer import LinkTimer, size_in_bytes, size_text

AXIS = "ranks"
_MOST_DEVICES = 1024  # which this process could simulate


def main() -> int:
    """Runs the command line and returns the exit code."""
    try:
        return _run()
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if _is_of_target(error):
            raise
        if isinstance(error, BrokenPipeError):  # as of `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE
        print(f"python -m cgx_jax: {error}", file=sys.stderr)
        return 1


def _is_of_target(error: OSError) -> bool:
    """Whether an error comes from what `compare` has imported."""
    paths = sysconfig.get_paths()
    known = "<", str(Path(__file__).parent), *(paths[x] for x in ("stdlib", "purelib", "platlib"))
    frames = traceback.walk_tb(error.__traceback__)
    return not all(frame.f_code.co_filename.startswith(known) for frame, _ in frames)


def _run() -> int:
    parser = _parser()
    arguments = parser.parse_args()
    if png := getattr(arguments, "png", None):
        if png.suffix != ".png":
            parser.error(f"--png {png}: pass a name that ends in .png")
        if not importlib.util.find_spec("matplotlib"):
            parser.error("--png needs matplotlib: pip install matplotlib")
    if arguments.devices is not None and not 1 <= arguments.devices <= _MOST_DEVICES:
        parser.error(f"--devices {arguments.devices}: pass 1 to {_MOST_DEVICES}, such as 8")
    if getattr(arguments, "link", None):
        if arguments.devices is not None or arguments.distributed is not None:
            parser.error("--link starts processes itself; leave out --devices and --distributed")
        if not rig.joined():
            if problem := rig.missing():
                parser.error(f"--link: {problem}")
            return rig.run(2, arguments.link, [sys.executable, "-m", "cgx_jax", *sys.argv[1:]])
        rig.initialize()
    if arguments.devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", arguments.devices)
    if arguments.distributed is not None:
        try:
            jax.distributed.initialize(cluster_detection_method=arguments.distributed or None)
        except (ImportError, KeyError, ValueError, RuntimeError) as error:
            parser.error(
                "--distributed: JAX does not find the other processes "
                f"({type(error).__name__}: {error}). Start this command once per rank with mpirun "
                "or srun, or name the launcher: --distributed mpi4py"
            )
    if arguments.command == "doctor":
        return doctor.run(arguments.json)
    if jax.device_count() == 1:
        parser.error("one device has nothing to reduce; pass --devices 8 to simulate 8 on this CPU")
    for name in ("json", "png", "out"):
        try:  # now, and not after minutes of measuring
            agreement.writable(getattr(arguments, name, None))
        except OSError as error:
            parser.error(f"--{name}: {error}")
    mesh = Mesh(np.array(jax.devices()), (AXIS,))
    if arguments.command == "tune":
        _tune(mesh, arguments)
        return 0
    links = LinkTimer(arguments.command, mesh, AXIS)
    paths = {"json_path": arguments.json, "png_path": arguments.png}
    if arguments.profile:
        _follow(arguments.profile, mesh.size, parser)
    if arguments.command == "compare":
        exchange = next(e for e in EXCHANGES if e.shorthand == arguments.exchange)
        if problem := exchange.missing():
            parser.error(f"--exchange {arguments.exchange} does not work here: {problem}")
        try:
            sends = "auto" if arguments.profile else arguments.exchange
            compare.run(
                arguments.target, links, arguments.methods, arguments.steps, exchange=sends, **paths
            )
        except compare.Refused as error:
            parser.error(str(error))
    else:
        bench.run(
            links,
            arguments.sizes,
            arguments.bits,
            arguments.reps,
            follow_profile=arguments.profile is not None,
            link=arguments.link,
            **paths,
        )
    return 0


def _follow(path: Path, world: int, parser: argparse.ArgumentParser) -> None:
    """Activates a profile; exits with an error if it does not fit this machine or `world` ranks."""
    try:
        profile = auto.use_profile(path)
    except (OSError, ValueError) as error:
        parser.error(f"--profile: {error}")
    if profile is not None and profile.world != world:
        parser.error(
            f"--profile: {path} was measured with {profile.world} ranks, and this run has {world}; "
            f"measure again with python -m cgx_jax tune, or start {profile.world} ranks"
        )


def _parser() -> argparse.ArgumentParser:
    ranks = argparse.ArgumentParser(add_help=False)
    ranks.add_argument("--devices", type=int, metavar="N", help="simulate N devices on the CPU")
    ranks.add_argument(
        "--distributed",
        nargs="?",
        const="",
        metavar="METHOD",
        help="for runs of several processes: call jax.distributed.initialize(), which finds the "
        "others through the launcher, or through METHOD (mpi4py, slurm, ompi)",
    )
    file: dict[str, Any] = {"type": Path, "metavar": "FILE"}
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m cgx_jax", description=__doc__, formatter_class=plain
    )
    parser.add_argument("--version", action="version", version=f"cgx_jax {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    command = commands.add_parser(
        "bench",
        parents=[ranks],
        formatter_class=plain,
        help="time psum and every exchange at several sizes",
        description=bench.EXPLANATION,
    )
    _add_sweep(command, bits=[4])
    command.add_argument("--reps", type=_count, default=11, help="repeats (default %(default)s)")
    command.add_argument(
        "--link",
        type=_rate,
        metavar="RATE",
        help="run two processes on this machine, joined by a link of this rate, such as 100mbit "
        "or 1gbit",
    )
    command.add_argument("--profile", **file, help='also measure exchange="auto" with this profile')
    command.add_argument("--png", **file, help="plot time and busbw against size")
    command.add_argument("--json", **file, help="write the numbers")

    command = commands.add_parser(
        "tune", parents=[ranks], help='measure the profile that exchange="auto" follows'
    )
    _add_sweep(command, bits=list(sweep.BITS))
    command.add_argument("--out", **file, help="write the profile")
    command.add_argument(
        "--budget",
        type=_seconds,
        default=60.0,
        help="limit on its time, in seconds (default %(default)s)",
    )

    command = commands.add_parser(
        "compare",
        parents=[ranks],
        formatter_class=plain,
        help="time your own training step by several methods, and recommend one",
        description=compare.EXPLANATION,
    )
    command.add_argument(
        "target",
        metavar="MODULE[:FUNCTION]",
        help=f"function that builds the step (default of FUNCTION: {compare.DEFAULT_FUNCTION})",
    )
    command.add_argument(
        "--methods",
        type=_methods,
        default=list(trial.METHODS),
        help=f"comma-separated list of {', '.join(trial.METHODS)} (default: all)",
    )
    command.add_argument(
        "--steps", type=_count, default=20, help="number of timed steps (default %(default)s)"
    )
    how = command.add_mutually_exclusive_group()
    how.add_argument(
        "--exchange",
        default="xla",
        choices=[exchange.shorthand for exchange in EXCHANGES],
        help="how bytes travel; compresses every buffer (default %(default)s)",
    )
    how.add_argument(
        "--profile", **file, help='send each buffer as exchange="auto" does with this profile'
    )
    command.add_argument("--png", **file, help="plot time, bytes and error")
    command.add_argument("--json", **file, help="write the numbers")

    command = commands.add_parser(
        "doctor", parents=[ranks], help="show what this installation has and lacks"
    )
    command.add_argument("--json", action="store_true", help="print it as JSON")
    return parser


def _add_sweep(command: argparse.ArgumentParser, bits: list[int]) -> None:
    command.add_argument(
        "--sizes",
        type=_sizes,
        default=list(sweep.SIZES),
        help="fp32 bytes per rank, such as 4k,1M (default 4 KiB to 64 MiB by factors of 4)",
    )
    command.add_argument(
        "--bits",
        type=_bits,
        default=bits,
        help="widths from 1 to 8, such as 2,4 (default %(default)s)",
    )


def _sizes(text: str) -> list[int]:
    try:
        sizes = sorted({size_in_bytes(size) // 4 * 4 for size in text.split(",")})
    except ValueError:
        sizes = [0]
    if sizes[0] <= 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of sizes of 4 bytes or more; write 4k,1M"
        )
    return sizes


def _rate(text: str) -> str:
    try:
        rig.bits_per_second(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _bits(text: str) -> list[int]:
    bits = sorted(set(text.split(",")))
    if not set(bits) <= set("12345678"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of widths from 1 to 8; write 2,4")
    return [int(width) for width in bits]


def _methods(text: str) -> list[str]:
    names = list(dict.fromkeys(["exact", *text.split(",")]))
    if unknown := [name for name in names if name not in trial.METHODS]:
        raise argparse.ArgumentTypeError(
            f"{unknown[0]!r} is not a method; use one of {', '.join(trial.METHODS)}"
        )
    return names


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of 1 or more")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def _tune(mesh: Mesh, arguments: argparse.Namespace) -> None:
    profile = sweep.tune(
        mesh, AXIS, bits=arguments.bits, sizes=arguments.sizes, budget_seconds=arguments.budget
    )
    if jax.process_index() == 0:
        _print_choices(profile)
        measured = {row.bytes for row in profile.rows}
        if left_out := [size_text(size) for size in arguments.sizes if size not in measured]:
            print(f"left out: {', '.join(left_out)}; pass a --budget above {arguments.budget:g} s")
        if arguments.out is not None:
            files.write(arguments.out, profile.to_json())
            print(f"written to {arguments.out}: cgx_jax.use_profile({str(arguments.out)!r})")


def _print_choices(profile: Profile) -> None:
    """Prints the profile's figures and the method that "auto" takes for each size and width."""
    widths = sorted({row.bits for row in profile.rows if row.method != "psum"})
    spent = ", ".join(f"{kind} {s * 1e9:.2f}" for kind, s in profile.codec._asdict().items())
    print(f"{profile.world} ranks: latency {profile.latency * 1e6:.0f} us, ", end="")
    print(f"algbw {profile.algbw * 8e-9:.2f} Gbit/s, codec {spent} ns per value.")
    if profile.engine is not None:
        engine = profile.engine
        chosen = ", ".join(f"{k}={getattr(engine, k)}" for k in engine.tuned)
        print(f'"{engine.shorthand}" runs with {chosen}.')
    print("Fastest at payload bits per value, plain rounding:")
    usable = [e.shorthand for e in auto.available()]
    usable += [e.shorthand + ONE_SHOT for e in auto.available() if "gather" in e.can]
    rows = []
    for size in sorted({row.bytes for row in profile.rows}):
        cells = [size_text(size)]
        for width in widths:
            load = auto.Load(size // 4, width)
            method = auto.fastest(profile, usable, load)
            gain = auto.estimate(profile, "psum", load) / auto.estimate(profile, method, load)
            cells.append(f"{method} ({gain:.2f}x)")
        rows.append(cells)
    columns = [Column(f"{width:g}", 24, right=True) for width in widths]
    print(*table_lines([Column("size", 10, right=True), *columns], rows), sep="\n")


if __name__ == "__main__":
    sys.exit(main())
