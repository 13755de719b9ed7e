"""One MPI rank of tests/test_mpi.py: runs the scenarios that the command line names."""

import functools
import itertools
import logging
import os
import signal
import sys
import threading
import time

import mpi4py

if "no_threads" in sys.argv:
    mpi4py.rc.thread_level = "single"
from mpi4py import MPI

if {"two_devices", "alone"} & set(sys.argv):
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax import Cast, ErrorFeedback, Identity, Plan, Quantize, Rule, Rules, SecondMoment
from cgx_jax._compat import coordination
from cgx_jax.axes import Axes
from cgx_jax.choice import Auto
from cgx_jax.compressors import QSGD, TopK
from cgx_jax.exchanges import Mpi, fused, mpi, mpi_rows
from cgx_jax.policies import training_loop
from cgx_jax.reductions import Levels
from cgx_jax.reductions.named import named
from cgx_jax.route.route import Options, route
from cgx_jax.testing import check_exchange
from cgx_jax.transforms import diloco
from cgx_jax.tuning import Setting
from reducing import pmean_with_residual
from toys import Largest, Steps
from worlds import RANKS, first, placed, with_state

RANK, WORLD = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
jax.config.update("jax_platforms", "cpu")
if "alone" not in sys.argv:
    jax.distributed.initialize(cluster_detection_method="mpi4py")


def mesh_of(**axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes))


def place(mesh, x, spec=None):
    """Splits a host array, the same on all ranks, over all mesh axes or as `spec` says."""
    sharding = NamedSharding(mesh, P(mesh.axis_names) if spec is None else spec)
    return jax.make_array_from_callback(x.shape, sharding, lambda i: x[i])


REPLICATED = P()


def sharded(mesh, f, *, spec=None, out=REPLICATED, check_vma=True):
    """Returns f of a rank's own rows, compiled."""
    return jax.jit(
        jax.shard_map(
            lambda *xs: f(*(x[0] for x in xs)),
            mesh=mesh,
            in_specs=P(mesh.axis_names) if spec is None else spec,
            out_specs=out,
            check_vma=check_vma,
        )
    )


def own(x):
    return np.asarray(x.addressable_data(0))


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(dtype)


def same_bytes(what, make, *inputs, mesh, spec=None, **options):
    """Both exchanges write the same bytes on this rank."""
    operands = [place(mesh, x, spec) for x in inputs]
    got, want = (
        sharded(mesh, lambda *xs, e=e: make(e, *xs), spec=spec, **options)(*operands)
        for e in ("mpi", "xla")
    )
    for (path, g), w in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        here = f"{what}{jax.tree_util.keystr(path)} on rank {RANK}"
        assert own(g).tobytes() == own(w).tobytes(), here


FUSED = {"scatter_gather": "cgx_all_reduce_mpi", "gather_sum": "cgx_gather_sum_mpi"}


def agreement():
    """A reduction in one call gives the bytes of the xla exchange, whatever is around it."""
    how, line = sys.argv[2], mesh_of(data=WORLD)
    key = jax.random.key(5)
    x, y = normal(WORLD, 33, 301), normal(WORLD, 70, 40, seed=1, dtype=jnp.bfloat16)
    Mpi(segment_bytes=512).require("here", ())  # many segments of few bytes
    compressors = [
        Quantize(4), Quantize(1, 64), Quantize(8, 96), Quantize(3, 32, "stochastic"),
        Quantize(4, 128, "correlated", rotation=True), Cast(jnp.bfloat16),
    ]  # fmt: skip
    for c in compressors:

        def both(e, x, y, c=c):
            k = key if c.needs_key else None
            options = {"key": k, "exchange": e, "reduction": how}
            return cgx_jax.pmean_compressed({"x": x, "y": y}, "data", c, **options)

        same_bytes(str(c), both, x, y, mesh=line)

        def fed(e, x, y, c=c):
            tree = {"x": x, "y": y, "half": x.astype(jnp.float16)}
            plan = cgx_jax.Plan.build(tree, c)
            options = {"key": key, "exchange": e, "reduction": how}
            mean, lost = pmean_with_residual("fed", tree, "data", plan, **options)
            return mean, [r[None] for r in lost]

        same_bytes(f"{c} with residuals", fed, x, y, mesh=line, out=(P(), P("data")))

    for c in (Quantize(4), compressors[4]):

        def in_units(e, x, y, c=c):
            tree = {"x": x, "y": y}
            plan = cgx_jax.Plan.build(tree, c)
            rows, columns = jnp.linspace(0.01, 9, 2 * 70), jnp.linspace(5, 0.1, 2 * 40)
            units = [None, (rows.reshape(2, 70), columns.reshape(2, 40))]
            options = {"units": units, "key": key, "exchange": e, "reduction": how}
            mean, lost = pmean_with_residual("here", tree, "data", plan, **options)
            return mean, [r[None] for r in lost]

        same_bytes(f"{c} in units", in_units, x, y, mesh=line, out=(P(), P("data")))

    def psum(e, x, axis="data", **options):
        return cgx_jax.psum_compressed(x, axis, Quantize(4), exchange=e, reduction=how, **options)

    same_bytes("check_vma off", psum, x, mesh=line, check_vma=False)
    same_bytes("one value", psum, normal(WORLD, 1), mesh=line)
    same_bytes("no value", psum, normal(WORLD, 0), mesh=line)
    same_bytes("2^20 + 3", psum, normal(WORLD, 2**20 + 3), mesh=line)
    same_bytes("vmap", lambda e, x: jax.vmap(lambda v: psum(e, v))(x), x, mesh=line)
    same_bytes("vmap of none", lambda e, x: jax.vmap(lambda v: psum(e, v))(x[:0]), x, mesh=line)
    same_bytes("remat", lambda e, x: jax.checkpoint(lambda v: psum(e, v))(x), x, mesh=line)
    same_bytes(
        "grad",
        lambda e, x: jax.grad(lambda v: (psum(e, v) ** 2).sum())(x)[None],
        x, mesh=line, out=P("data"),
    )  # fmt: skip
    if WORLD % 2 == 0:
        grid = mesh_of(data=2, model=WORLD // 2)
        same_bytes("two axes", lambda e, x: psum(e, x, ("data", "model")), x, mesh=grid)
        same_bytes("model axis", lambda e, x: psum(e, x, "model"), x, mesh=grid, out=P("data"))
        same_bytes("data axis", lambda e, x: psum(e, x, "data"), x, mesh=grid, out=P("model"))
        # check_vma sees that a value that is the same along the other axis stays the same.
        alike = {"mesh": grid, "spec": P("data")}
        same_bytes("alike along model", lambda e, x: psum(e, x, "data"), x, **alike)
    groups = [[0, WORLD - 1], list(range(1, WORLD - 1))] if WORLD == 4 else None
    same_bytes(
        "groups",
        lambda e, x: psum(e, x, axis_index_groups=groups)[None],
        x, mesh=line, out=P("data"),
    )  # fmt: skip

    def in_scan(e, x):
        def body(total, scale):
            return total + psum(e, x * scale), None

        return lax.scan(body, psum(e, x), jnp.arange(3.0))[0]

    same_bytes("scan", in_scan, x, mesh=line)

    def reduced_and_used(e, x):
        twice = x * 2  # the program's own, so the sum may take its memory
        return psum(e, twice), psum(e, {"a": twice, "b": twice}), (x + twice)[None]

    same_bytes("used after", reduced_and_used, x, mesh=line, out=(P(), P(), P("data")))
    computed = how == "scatter_gather"  # the call for small buffers takes new memory
    for f, reused in ((lambda x: psum("mpi", x), False), (lambda x: psum("mpi", x * 2), computed)):
        lowered = sharded(line, f).lower(place(line, x)).as_text()
        assert ("output_operand_alias" in lowered) == reused, lowered
    # Without a profile "auto" is MPI here from about half a megabyte on.
    for e, values, by_mpi in (("auto", 25_000, 0), ("auto", 250_000, 1), ("mpi", 100, 1)):
        lowered = sharded(line, lambda x, e=e: psum(e, x)).lower(place(line, normal(WORLD, values)))
        assert lowered.as_text().count(f"@{FUSED[how]}(") == by_mpi, (e, values)


ROWS = {  # by exchange: rows u8[world, n] scattered, a row u8[n] gathered
    "mpi": (
        lambda x, axes, groups: mpi_rows.scatter("here", x, Axes.resolve("here", axes, groups)),
        lambda x, axes, groups: mpi_rows.gather("here", x, Axes.resolve("here", axes, groups)),
    ),
    "xla": (
        lambda x, axes, groups: lax.all_to_all(x, axes, 0, 0, axis_index_groups=groups),
        lambda x, axes, groups: lax.all_gather(x, axes, axis_index_groups=groups),
    ),
}


def both_of(e, x, *axes, groups=None):
    """Scatters the rows, and gathers the first of them."""
    if e == "mpi":
        Mpi().require("here", axes)
    scatter, gather = ROWS[e]
    return scatter(x, axes, groups), gather(x[0], axes, groups)


def rows():
    """MPI moves whole rows exactly as XLA's collectives do."""
    line, grid = mesh_of(data=WORLD), mesh_of(data=2, model=WORLD // 2)
    Mpi(segment_bytes=64, window=2).require("here", ())  # many segments of few bytes

    def of_bytes(world, n, *more):
        return np.random.default_rng(n).integers(0, 256, (WORLD, *more, world, n), np.uint8)

    def each(fs, *xs, mesh=line):
        """Compares results as each rank's own, whatever their type says; in one program."""
        own = lambda e, *xs: [  # noqa: E731
            jax.tree.map(lambda y: y[None], f(e, x)) for f, x in zip(fs, xs, strict=True)
        ]
        same_bytes("rows", own, *xs, mesh=mesh, out=P(mesh.axis_names))

    def over(*axes, groups=None):
        return lambda e, x: both_of(e, x, *axes, groups=groups)

    def in_vmap(e, x):
        return jax.vmap(lambda y: both_of(e, y, "data"))(x)

    def in_scan(e, x):
        def body(rows, _):
            scattered, gathered = both_of(e, rows, "data")
            return scattered + gathered, None

        return lax.scan(body, x, None, length=3)[0]

    x, two = of_bytes(WORLD, 300), of_bytes(2, 300)
    halves = [[0, WORLD - 1], list(range(1, WORLD - 1))] if WORLD == 4 else [[1, 0]]
    sizes = [of_bytes(WORLD, n) for n in (0, 1, 13, 64, 128, 1000)]
    more = [over("data", groups=halves), in_vmap, in_scan]
    each([over("data")] * 6 + more, *sizes, two, of_bytes(WORLD, 300, 3), x)
    along = [over("data", "model"), over("data"), over("model")]
    each(along, x, two, of_bytes(WORLD // 2, 300), mesh=grid)
    # Without groups, a gathered array is typed as the same on all ranks.
    gathered = sharded(line, lambda x: both_of("mpi", x, "data")[1])(place(line, x))
    np.testing.assert_array_equal(own(gathered), x[:, 0])


def kinds():
    """Every code, reduction, half and level of rows gives the bytes of the xla exchange."""
    line, grid = mesh_of(data=WORLD), mesh_of(node=2, local=WORLD // 2)
    check_exchange(Mpi(), line, "data")
    key, x = jax.random.key(5), normal(WORLD, 8 * WORLD, 70)
    codes = [Quantize(3, 96, "stochastic"), Cast(jnp.bfloat16), Steps(), Largest()]

    def reduced(e, x, axis="data", **levels):
        options = {"key": key, "exchange": e, **levels}
        return {
            f"{c} by {how}": cgx_jax.psum_compressed(x, axis, c, reduction=how, **options)
            for c in codes
            for how in c.reductions
            if named("kinds", how).needs <= Mpi().can
        }

    def halves(e, x):
        return {
            f"{c}, {half.__name__}": half(x, "data", c, key=key, exchange=e, tiled=True)[None]
            for c in codes
            for half in (cgx_jax.psum_scatter_compressed, cgx_jax.all_gather_compressed)
        }

    def every(e, x):
        return reduced(e, x), halves(e, x)

    same_bytes("kinds", every, x, mesh=line, out=(P(), P("data")))
    if WORLD > 2:  # else a level is a rank
        near = functools.partial(reduced, axis=("node", "local"), levels=Levels("local"))
        same_bytes("over levels", near, x, mesh=grid)


def other_rows():
    """The last rank sends rows of another size."""
    mesh = mesh_of(data=WORLD)
    n = 500 if RANK == WORLD - 1 else 501
    x = place(mesh, np.zeros((WORLD, WORLD, 501), np.uint8))
    report(failing(sharded(mesh, lambda x: both_of("mpi", x[:, :n], "data")[1]), x)[0])
    MPI.COMM_WORLD.Barrier()  # the first to leave with an error ends the others
    os._exit(3)


def twin_rows():
    """One compiled function called twice is refused for rows too."""
    mesh = mesh_of(data=WORLD)
    x = place(mesh, np.zeros((WORLD, 2, 5000), np.uint8))
    inner = jax.jit(lambda v: ROWS["mpi"][1](v, ("data",), None))

    def twice(x):
        Mpi().require("here", ("data",))
        return [inner(x[0]), inner(x[1])]

    report(failing(sharded(mesh, twice), x)[0])


def many():
    """50 calls in one program, which every rank starts in its own order."""
    mesh, calls = mesh_of(data=WORLD), 50
    x = place(mesh, normal(WORLD, calls, 2000))

    def delayed(i, row):
        time.sleep(np.random.default_rng(1000 * RANK + int(i)).uniform(0, 0.01))
        return row

    def reduce(exchange, x):
        rows = [x[i] for i in range(calls)]
        if exchange == "mpi":
            rows = [jax.pure_callback(delayed, row, i, row) for i, row in enumerate(rows)]
        return [cgx_jax.psum_compressed(r, "data", exchange=exchange) for r in rows]

    step = sharded(mesh, lambda x: reduce("mpi", x), check_vma=False)
    want = sharded(mesh, lambda x: reduce("xla", x), check_vma=False)(x)
    for _ in range(3):
        for got, expected in zip(step(x), want, strict=True):
            np.testing.assert_array_equal(own(got), own(expected))


def failing(f, *inputs):
    """Returns what the call raises, and the seconds until then."""
    start = time.monotonic()
    try:
        jax.block_until_ready(f(*inputs))
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    raise AssertionError("the call succeeded")


def reducer(mesh, **options):
    return sharded(mesh, lambda x: cgx_jax.psum_compressed(x, "data", exchange="mpi", **options))


def report(message):
    os.write(1, f"[{RANK}] {message}\n".encode())  # at once, so that ranks' lines stay whole


def end_without_the_last():
    """Rank 0 ends all when the others have reported; JAX and MPI would wait for the last rank."""
    client = coordination()
    if RANK:
        client.key_value_set(f"reported/{RANK}", "")
        time.sleep(60)
    for rank in range(1, WORLD - 1):
        client.blocking_key_value_get(f"reported/{rank}", 60_000)
    os._exit(3)


def killed():
    """The last rank dies in the middle of a fused call."""
    mesh = mesh_of(data=WORLD)
    Mpi(timeout=3.0).require("here", ())
    x, step = place(mesh, normal(WORLD, 300_000)), reducer(mesh)
    if "between" in sys.argv:  # the start of the call and its end, which are in two programs
        like = jnp.zeros(x.shape[1:])
        tx = diloco(optax.sgd(1.0), "data", every=2, delay=1, exchange="mpi", mesh=mesh)
        state = tx.init(like)
        state = jax.device_put(state, cgx_jax.state_shardings(state, "data", mesh))
        specs = cgx_jax.state_specs(state, "data")

        @jax.jit
        @functools.partial(
            jax.shard_map, mesh=mesh, in_specs=(P("data"), specs), out_specs=(P(), specs)
        )
        def update(x, state):
            return tx.update(x[0], state, like)

        def step(x):
            _, two = update(x, update(x, state)[1])
            return update(x, two)

    jax.block_until_ready(step(x))
    if RANK == WORLD - 1:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def forever():
        while True:
            jax.block_until_ready(step(x))

    report(failing(forever)[0])
    message, seconds = failing(step, x)
    report(f"again {message} after {seconds:.1f} s")
    end_without_the_last()


def disagreement():
    """The last rank runs a different plan, or a different reduction."""
    mesh = mesh_of(data=WORLD)
    options = {"widths": {"compressor": Quantize(8)}, "reductions": {"reduction": "gather_sum"}}[
        sys.argv[2]
    ]
    x = place(mesh, normal(WORLD, 10_000))
    report(failing(reducer(mesh, **(options if RANK == WORLD - 1 else {})), x)[0])
    MPI.COMM_WORLD.Barrier()  # the first to leave with an error ends the others
    os._exit(3)


def orders():
    """Two programs with the same sums; the last rank starts them in reverse order.

    They differ in the line of the call, or come from one line and differ in the rest.
    """
    mesh = mesh_of(data=WORLD)
    x = place(mesh, normal(WORLD, 10_000))

    def make(scale):
        def step(x):
            return cgx_jax.psum_compressed(x, "data", exchange="mpi") * scale

        return sharded(mesh, step)

    def by_path(path):
        def step(tree):
            return cgx_jax.psum_compressed({path: tree[path][0]}, "data", exchange="mpi")

        step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P()))
        return lambda x: step({path: x.reshape(WORLD, 100, 100)})

    if sys.argv[2] == "lines":
        first = sharded(mesh, lambda x: cgx_jax.psum_compressed(x, "data", exchange="mpi"))
        second = sharded(mesh, lambda x: cgx_jax.psum_compressed(x, "data", exchange="mpi"))
    elif sys.argv[2] == "constants":
        first, second = make(1.0), make(2.0)
    else:
        first, second = by_path("a"), by_path("b")
    for step in (first, second):  # in one order on all ranks nothing is refused
        jax.block_until_ready(step(x))
    report(failing(first if RANK < WORLD - 1 else second, x)[0])
    MPI.COMM_WORLD.Barrier()  # the first to leave with an error ends the others
    os._exit(3)


def dispatched(mesh):
    """A reduction that returns before it ends, which XLA does for larger programs."""
    return sharded(mesh, lambda x: cgx_jax.psum_compressed(jnp.sort(x), "data", exchange="mpi"))


def raises():
    """The last rank ends with an exception, before or during a call that may last ten minutes."""
    mesh = mesh_of(data=WORLD)
    x, step = place(mesh, normal(WORLD, 10_000)), dispatched(mesh)
    if sys.argv[2] != "first":
        jax.block_until_ready(step(x))
    if RANK == WORLD - 1:
        if sys.argv[2] == "in":
            step(x)
            time.sleep(1)
        raise RuntimeError("the data are broken")
    if sys.argv[2] == "in":
        time.sleep(5)  # until the last rank has given up
    report(failing(step, x)[0])
    end_without_the_last()


def unawaited():
    """Processes may end while calls are under way, also those that another one waits for."""
    mesh = mesh_of(data=WORLD)
    x, step = place(mesh, normal(WORLD, 1_000_000)), dispatched(mesh)
    jax.block_until_ready(step(x))
    calls = [step(x) for _ in range(6)]  # which last longer than others wait for one that has left
    if RANK == 0:
        jax.block_until_ready(calls)


def started():
    """A delayed reduction runs beside later steps, and gives the bits of the xla exchange.

    So does one of which the process knows nothing: its step was repeated, or its state restored.
    """
    mesh = mesh_of(data=WORLD)
    like = {"a": jnp.zeros((130, 260)), "b": jnp.zeros((4, 2048), jnp.bfloat16), "c": jnp.ones(9)}
    xs = [
        jax.tree.map(
            lambda v, n=n: place(mesh, normal(WORLD, *v.shape, seed=n, dtype=v.dtype)), like
        )
        for n in range(7)
    ]

    def trained(exchange, *codes, **how):
        options = {"every": 4, "delay": 2, "mesh": mesh, "exchange": exchange} | how
        known = [diloco(optax.sgd(0.1), "data", code, **options) for code in codes]
        state = placed(jax.jit(known[0].init)(like), mesh)

        def step_of(tx):
            step = lambda g, s: tx.update(first(g), s, like)  # noqa: E731
            return jax.jit(with_state(step, mesh, state, RANKS))

        steps = [step_of(tx) for tx in known]
        for again in (False, True):
            out, now = [], state
            for i, x in enumerate(xs):
                step = steps[-(i > 4)]
                if again:
                    step(x, now)  # finishes, or replaces, what the next line looks for
                updates, now = step(x, now)
                out.append(updates)
            tickets = [int(own(f.ticket).sum()) for f in now.fragments]
            assert all(tickets) == (exchange == "mpi"), tickets
            # A ticket says only where to look.
            rest = now._replace(fragments=[f._replace(ticket=()) for f in now.fragments])
            yield jax.tree.map(own, (out, rest))

    whole = {"memory": ErrorFeedback(), "precondition": SecondMoment()}
    noisy = Quantize(4, rounding="stochastic")
    for codes, how in (
        ([Quantize(4, rotation=True, rounding="stochastic")], whole),
        ([noisy, noisy], {"reduction": "gather_sum", "fragments": 2}),  # compiled anew on the way
        # What is under way when the plan changes is not taken for another code's.
        ([Rules([Rule(TopK(0.5), path=path)]) for path in "ab"], {}),
    ):
        want, *more = (x for e in ("xla", "mpi") for x in trained(e, *codes, **how))
        for got in more:
            jax.tree.map(np.testing.assert_array_equal, got, want)


def twins():
    """Calling one compiled function twice is refused; the same sums without it are not."""
    mesh = mesh_of(data=WORLD)
    x = place(mesh, normal(WORLD, 2, 50_000))
    inner = jax.jit(lambda v: cgx_jax.psum_compressed(v, "data", exchange="mpi"))
    report(failing(sharded(mesh, lambda x: [inner(x[0]), inner(x[1])]), x)[0])
    both = sharded(mesh, lambda x: [cgx_jax.psum_compressed(v, "data", exchange="mpi") for v in x])
    jax.block_until_ready(both(x))


def followed():
    """A rank that is late to a new engine's first call does not count as gone with the old one."""
    mesh, x = mesh_of(data=WORLD), normal(WORLD, 4000)
    want = None
    for exchange in (Mpi(window=2), Mpi(window=3)):

        def reduce(x, exchange=exchange):
            return cgx_jax.psum_compressed(x, "data", Quantize(4), exchange=exchange)

        time.sleep(0.5 * RANK)  # the others' engines run by then
        step = sharded(mesh, reduce).lower(place(mesh, x)).compile()
        time.sleep(2.5 * RANK)
        got = own(step(place(mesh, x)))
        want = got if want is None else want
        np.testing.assert_array_equal(got, want)


def tuned():
    """Tuning measures the fused call too; every rank holds the same profile and follows it."""
    mesh = mesh_of(data=WORLD)
    profile = cgx_jax.tune(mesh, "data", bits=(4,), budget_seconds=5.0)
    assert {row.method for row in profile.rows} == {
        *("psum", "xla", "mpi"),
        *("xla/gather_sum", "mpi/gather_sum"),
    }
    assert profile.world == WORLD
    assert profile.mpi
    assert len(set(MPI.COMM_WORLD.allgather(profile.to_json()))) == 1
    x = np.zeros((WORLD, 64, 4096), np.float32)
    plan = cgx_jax.Plan.build(jax.ShapeDtypeStruct(x.shape[1:], x.dtype), Quantize(4))
    (way,) = route(Options("here", Axes((), None, WORLD), Auto()), plan).ways.values()
    text = sharded(mesh, lambda x: cgx_jax.psum_compressed(x, "data", plan)).lower(place(mesh, x))
    by_mpi = way is not None and way.exchange == profile.engine
    handlers = [handler for handler in FUSED.values() if f"@{handler}(" in text.as_text()]
    assert handlers == ([FUSED[way.reduction.shorthand]] if by_mpi else [])
    running = {k: v for k, v in mpi._running.items() if k in Mpi.tuned}
    assert running == {k: getattr(profile.engine, k) for k in Mpi.tuned}


def chosen():
    """A tuner tries this exchange and XLA's: the slowest rank counts, and all keep the same one.

    The engine runs with the options that it keeps.
    """
    mesh, x = mesh_of(data=WORLD), normal(WORLD, 64, 64)
    Mpi(window=8).require("here", ())  # options that are not the tuner's
    communicator = mpi._own
    tuner = cgx_jax.Tuner(compilations=5, rounds=4, cache=False)
    tx = cgx_jax.sync_gradients("data", Quantize(4), exchange=tuner, mesh=mesh)
    state = tx.init(x[0])
    step = tuner.jit(
        jax.shard_map(
            lambda x, s: tx.update(x[0], s),
            mesh=mesh,
            in_specs=(P("data"), P()),
            out_specs=(P(), P()),
        )
    )
    costs = {"psum": 1.0, "mpi": 0.7, "xla": 0.1 if RANK else 0.9}

    def cost():
        way = tuner.current
        name = "psum" if way.exchange is None else way.exchange.shorthand
        return costs[name] + 0.05 * (way.reduction is not None)

    ticks = itertools.cycle([lambda: 0.0, cost])
    training_loop.clock = lambda: next(ticks)()
    tried = set()
    for _ in range((4 + 2 + 2) * (1 + 2 * 4) + 1):
        mean, state = step(place(mesh, x), state)
        tried.add(tuner.current)
    assert len(tried) == 5, tried
    assert tuner.state == "kept"
    kept = mpi.defaults()
    assert set(MPI.COMM_WORLD.allgather(str(tuner.current))) == {str(Setting(kept))}
    want = sharded(mesh, lambda x: cgx_jax.pmean_compressed(x, "data", Quantize(4), exchange=kept))(
        place(mesh, x)
    )
    np.testing.assert_array_equal(own(mean), own(want))
    running = {k: v for k, v in mpi._running.items() if k in Mpi.tuned}
    assert running == {k: getattr(kept, k) for k in Mpi.tuned}
    assert mpi._own is communicator  # MPI has few of them, and engines start anew many times


def refused():
    """Tracing is refused with any world that does not fit."""
    mesh = mesh_of(data=jax.device_count())
    x = np.zeros((jax.device_count(), 5000), np.float32)
    report(failing(lambda: reducer(mesh).lower(place(mesh, x)))[0])


def permuted():
    """The mesh has its positions in another order than MPI its ranks."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[::-1]), ("data",))
    x = place(mesh, normal(WORLD, 10_000))
    report(failing(reducer(mesh), x)[0])


def misgrouped():
    """A program whose list of groups ends in the middle of this rank's group."""
    attributes = fused.Bound.attributes

    def damaged(*args, **options):
        return attributes(*args, **options) | {"groups": np.array([7, 8, RANK], np.int64)}

    mesh = mesh_of(data=WORLD)
    fused.Bound.attributes = damaged
    report(failing(reducer(mesh), place(mesh, normal(WORLD, 10_000)))[0])
    fused.Bound.attributes = attributes


def misuse():
    """What is refused on all ranks while programs are made or run; calls in between succeed."""
    for scenario in (twins, twin_rows, permuted, misgrouped):
        scenario()


def subnormal():
    """XLA's results after a call have the same bits on all ranks, whichever thread runs them."""
    mesh, plan = mesh_of(data=WORLD), [Quantize(8), QSGD(levels=127)]

    def reduce(rows):
        like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in rows]
        codes = Plan.build(like, Identity(), overrides=dict(zip("01", plan, strict=True)))
        return cgx_jax.psum_compressed(rows, "data", codes, key=jax.random.key(1), exchange="mpi")

    step = sharded(mesh, lambda x, y: reduce([x, y]))
    for seed in range(600):
        rng = np.random.default_rng(seed)
        large = rng.normal(size=(WORLD, 129)).astype(np.float16)
        small = rng.uniform(-5e-38, 5e-38, (WORLD, 64, 64)).astype(np.float32)
        sums = step(place(mesh, large), place(mesh, small))
        sent = b"".join(own(x).tobytes() for x in sums)
        assert len(set(MPI.COMM_WORLD.allgather(sent))) == 1, seed


def watched():
    """A report names what a rank put in, though sums may take the memory of their operands."""
    mesh, lines = mesh_of(data=WORLD), []
    logging.getLogger("cgx_jax.debug.report").addFilter(lambda r: lines.append(r.getMessage()))
    x = normal(WORLD, 33, 301)
    x[WORLD - 1, 7, 5] = np.nan
    for reduction in FUSED:

        def reduce(x, reduction=reduction):
            options = {"reduction": reduction, "exchange": "mpi"}
            return cgx_jax.psum_compressed(2 * x, "data", Quantize(4), **options)

        want = own(sharded(mesh, reduce)(place(mesh, x)))
        with cgx_jax.debug_nonfinite("log"):
            got = own(sharded(mesh, reduce)(place(mesh, x)))
            jax.effects_barrier()
        np.testing.assert_array_equal(got, want)
        line = f"in '' float32[33, 301]: rank {WORLD - 1} has 1 of 9933, the first at [7, 5]"
        assert [line in text for text in lines] == [True] * (RANK == 0), lines
        lines.clear()


def explicit():
    """On explicit axes, payloads over MPI give the bytes of the xla exchange."""
    mesh = jax.make_mesh((WORLD,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    reduced = P(None, None, reduced={"data"})
    with jax.set_mesh(mesh):
        shards = place(mesh, normal(32, 48), P("data"))
        x = place(mesh, normal(8 * WORLD, 32), P("data"))

        def both_ways(exchange, shards, x):
            how = {"backward": Quantize(4), "exchange": exchange}

            def loss(shards):
                return jnp.sum(jnp.sin(x @ cgx_jax.reshard(shards, reduced, Quantize(8), **how)))

            whole = jax.reshard(shards, reduced)
            gradient = jax.grad(lambda w: jnp.sum(jnp.sin(x @ w)))(whole)
            total = cgx_jax.reshard(gradient, P(), Quantize(4), exchange=exchange)
            return total, jax.reshard(jax.grad(loss)(shards), P())

        got, want = (
            jax.jit(functools.partial(both_ways, exchange))(shards, x)
            for exchange in ("mpi", "xla")
        )
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(own(a), own(b)), got, want)


_ALL = (agreement, kinds, many, killed, disagreement, misuse, tuned, refused, rows, other_rows)
_ALL += (followed, chosen, orders, raises, unawaited, started, subnormal, watched, explicit)
SCENARIOS = {f.__name__: f for f in _ALL}
for name in sys.argv[1:]:
    if name in SCENARIOS:  # the others are its arguments
        SCENARIOS[name]()
        report(f"{name}: ok")
