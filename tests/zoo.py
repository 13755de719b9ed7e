"""Random losses and auxiliary outputs: value_and_grad equals plain jit on each, or refuses it.

`python tests/zoo.py --count 10000 --seed 0` prints how many programs were accepted and refused, and
each that was accepted with wrong numbers. A program is a random walk over operations that keep
examples apart, add them up or mix them, inside random wrappers (checkpoint, jit, scan, custom
derivatives), with random specs for its outputs.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import cgx_jax

WORLD, ROWS, WIDTH, CLASSES = 4, 16, 4, 4  # as many classes as features, and as ranks
TOLERANCE = 2e-3


@functools.cache
def mesh():
    return jax.make_mesh((WORLD,), ("data",), axis_types=(AxisType.Auto,))


@functools.cache
def data(rows):
    """Parameters and a batch of `rows` examples, whose parts differ much from rank to rank."""
    rng = np.random.default_rng(7)
    params = {"w": rng.normal(size=(WIDTH, WIDTH)) / 2, "b": rng.normal(size=WIDTH) / 2}
    step = 0.2 + np.arange(rows) / rows
    batch = {
        "x": rng.normal(size=(rows, WIDTH)) * step[:, None] + step[:, None],
        "v": rng.normal(size=rows) * step,
        "m": (rng.random(rows) < step / 2).astype(np.float32) + (np.arange(rows) < 2),
    }
    params, batch = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), (params, batch))
    return params, {**batch, "y": jnp.asarray(rng.integers(0, CLASSES, rows), jnp.int32)}


# Operations: name -> (kinds of the operands, kind of the result, function of the environment and
# the operands). Kinds: "nf" is [rows, features], "n" [rows], "f" [features], "ff" a matrix, "s" a
# number. `y` and `p` of the environment are the labels and the parameters.


def _sqrt(a):
    return jnp.sqrt(jnp.square(a) + 1)


def _while(test, body, start):
    """Returns the second value of a loop's state; such loops have no gradient."""
    return lax.stop_gradient(lax.while_loop(test, body, jax.tree.map(lax.stop_gradient, start))[1])


def _mixing_derivative(axis):
    @jax.custom_vjp
    def f(a):
        return jnp.tanh(a)

    f.defvjp(lambda a: (jnp.tanh(a), a), lambda a, g: ((g - g.mean(axis)) * (1 + a**2),))
    return f


def _layers(w, a):
    return lax.scan(lambda c, w: (jnp.tanh(c @ w), 0.0), a, jnp.stack([w, w.T]))[0]


def _examples(body):
    """A loop over the examples that adds up."""
    return lambda e, a: lax.scan(lambda c, r: (c + body(r), body(r)), jnp.zeros(()), a)


def _norm(a, axis):
    return (a - a.mean(axis, keepdims=True)) / jnp.sqrt(a.var(axis, keepdims=True) + 0.1)


UNARY = {
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "sqrt": _sqrt,
    "square": lambda a: jnp.square(a) / 2,
    "sign": lambda a: jnp.where(a > 0.1, a, -2 * a),
    "clip": lambda a: jnp.clip(a, -1.0, 0.8),
    "scaled": lambda a: 0.7 * a - 0.2,
    "gelu": jax.nn.gelu,
    "stop": lambda a: a + lax.stop_gradient(jnp.tanh(a)),
    "bfloat16": lambda a: lax.reduce_precision(a, 8, 23),
    "checkpoint": jax.checkpoint(lambda a: jnp.sin(a) * a),
    "jit": jax.jit(lambda a: jnp.cos(a) * a),
    "loop": lambda a: lax.fori_loop(0, 2, lambda i, c: jnp.tanh(c) + 0.1 * i, a),
    "while": lambda a: a + _while(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] / 2), (0, a)),
}
BINARY = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "max": jnp.maximum,
    "div": lambda a, b: a / (1 + b**2),
    "where": lambda a, b: jnp.where(a > b, a, 0.5 * b),
    "hypot": lambda a, b: jnp.sqrt(a**2 + b**2 + 1),
}
OPERATIONS = {
    # The examples stay apart.
    "dense": (["nf"], "nf", lambda e, a: a @ e["p"]["w"] + e["p"]["b"]),
    "dense ff": (["nf", "ff"], "nf", lambda e, a, b: a @ b),
    "bias": (["nf", "f"], "nf", lambda e, a, b: a + b),
    "scale": (["nf", "f"], "nf", lambda e, a, b: a * b),
    "gate": (["nf", "n"], "nf", lambda e, a, b: a * b[:, None]),
    "times": (["nf", "s"], "nf", lambda e, a, b: a * b),
    "times n": (["n", "s"], "n", lambda e, a, b: a * b),
    "plus n": (["n", "s"], "n", lambda e, a, b: a + b),
    "softmax": (["nf"], "nf", lambda e, a: jax.nn.softmax(a, axis=-1)),
    "layer norm": (["nf"], "nf", lambda e, a: _norm(a, 1)),
    "sort": (["nf"], "nf", lambda e, a: jnp.sort(a, axis=1)),
    "cumsum": (["nf"], "nf", lambda e, a: jnp.cumsum(a, axis=1) / 2),
    "flip": (["nf"], "nf", lambda e, a: a[:, ::-1]),
    "roll": (["nf"], "nf", lambda e, a: jnp.roll(a, 1, axis=1)),
    "columns": (["nf"], "nf", lambda e, a: a[:, jnp.array([1, 0, 3, 3])]),
    "half": (["nf"], "n", lambda e, a: a[:, :2].sum(1)),
    "mean": (["nf"], "n", lambda e, a: a.mean(1)),
    "amax": (["nf"], "n", lambda e, a: a.max(1)),
    "logsumexp": (["nf"], "n", lambda e, a: jax.nn.logsumexp(a, axis=1)),
    "own": (["nf"], "n", lambda e, a: a[jnp.arange(len(a)), e["y"]]),
    "along": (["nf"], "n", lambda e, a: jnp.take_along_axis(a, e["y"][:, None], 1)[:, 0]),
    "one hot": (["nf"], "n", lambda e, a: (a * jax.nn.one_hot(e["y"], CLASSES)).sum(1)),
    "look up": (["f"], "n", lambda e, a: a[e["y"]]),
    "rows of": (["ff"], "nf", lambda e, a: a[e["y"]]),
    "set own": (["nf"], "nf", lambda e, a: a.at[jnp.arange(len(a)), e["y"]].add(1.0)),
    "set column": (["nf"], "nf", lambda e, a: a.at[:, 1].set(0.5)),
    "vmap": (["nf"], "nf", lambda e, a: jax.vmap(lambda r: e["p"]["w"] @ r - r.mean())(a)),
    "map": (["nf"], "n", lambda e, a: lax.map(lambda r: jnp.tanh(r @ e["p"]["b"]), a)),
    "flat": (["nf"], "nf", lambda e, a: jnp.tanh(a.reshape(-1)).reshape(-1, WIDTH)),
    "groups": (["nf"], "nf", lambda e, a: _norm(a.reshape(len(a), 2, -1), 2).reshape(a.shape)),
    "scan": (["nf"], "n", lambda e, a: lax.scan(lambda c, r: (c + r, c), 0 * a[:, 0], a.T)[0]),
    "layers": (["nf"], "nf", lambda e, a: _layers(e["p"]["w"], a)),
    "inner grad": (["nf"], "nf", lambda e, a: jax.grad(lambda b: _sqrt(b @ e["p"]["w"]).sum())(a)),
    "own vjp": (["nf"], "nf", lambda e, a: jax.vmap(_mixing_derivative(0))(a)),
    "mask": (["nf"], "nf", lambda e, a: a * e["m"][:, None]),
    "mask n": (["n"], "n", lambda e, a: a * e["m"]),
    "concat": (["nf", "nf"], "nf", lambda e, a, b: jnp.concatenate([a[:, :2], b[:, 2:]], 1)),
    "stack": (["n", "n"], "nf", lambda e, a, b: jnp.stack([a, b, a, b], 1)),
    "einsum": (["nf", "nf"], "nf", lambda e, a, b: jnp.einsum("bi,bj,ij->bi", a, b, e["p"]["w"])),
    "outer": (["nf"], "n", lambda e, a: jnp.einsum("bi,bj->bij", a, a).sum((1, 2)) / 4),
    "pad": (["nf"], "nf", lambda e, a: jnp.pad(a, ((0, 0), (1, 0)))[:, :-1]),
    "conv": (["nf"], "nf", lambda e, a: jax.vmap(
        lambda r: jnp.convolve(r, e["p"]["b"], mode="same"))(a)),
    # Statistics of the batch.
    "mean 0": (["nf"], "f", lambda e, a: a.mean(0)),
    "mean n": (["n"], "s", lambda e, a: a.mean()),
    "sum 0": (["nf"], "f", lambda e, a: a.sum(0) / 8),
    "sum n": (["n"], "s", lambda e, a: a.sum() / 8),
    "max 0": (["nf"], "f", lambda e, a: a.max(0)),
    "max n": (["n"], "s", lambda e, a: a.max()),
    "gram": (["nf"], "ff", lambda e, a: a.T @ a / len(a)),
    "segments": (["nf"], "ff", lambda e, a: jax.ops.segment_sum(a, e["y"], CLASSES) / len(a)),
    "weighted": (["n"], "s", lambda e, a: (a * e["m"]).sum() / e["m"].sum()),
    "by mean": (["n"], "s", lambda e, a: (a * e["m"]).mean() / e["m"].mean()),
    "mean where": (["n"], "s", lambda e, a: jnp.mean(a, where=e["m"] > 0)),
    "loop sum": (["n"], "s", lambda e, a: _examples(jnp.tanh)(e, a)[0] / len(a)),
    "loop rows": (["n"], "n", lambda e, a: _examples(jnp.sin)(e, a)[1]),
    "contract": (["n", "nf"], "f", lambda e, a, b: a @ b / len(a)),
    # Examples meet.
    "softmax 0": (["nf"], "nf", lambda e, a: jax.nn.softmax(a, axis=0)),
    "batch norm": (["nf"], "nf", lambda e, a: _norm(a, 0)),
    "sort 0": (["nf"], "nf", lambda e, a: jnp.sort(a, axis=0)),
    "sort n": (["n"], "n", lambda e, a: jnp.sort(a)),
    "cumsum 0": (["n"], "n", lambda e, a: jnp.cumsum(a) / 4),
    "flip 0": (["nf"], "nf", lambda e, a: a[::-1]),
    "flip n": (["n"], "n", lambda e, a: a[::-1]),
    "roll 0": (["nf"], "nf", lambda e, a: jnp.roll(a, 1, axis=0)),
    "first": (["nf"], "f", lambda e, a: a[0]),
    "last": (["n"], "s", lambda e, a: a[-1]),
    "pairs": (["nf", "nf"], "n", lambda e, a, b: (a @ b.T).mean(1)),
    "differences": (["n"], "n", lambda e, a: jnp.abs(a[:, None] - a[None]).mean(1)),
    "halves": (["n"], "s", lambda e, a: jnp.square(a[: len(a) // 2] - a[len(a) // 2 :]).mean()),
    "odd": (["nf"], "f", lambda e, a: a[::2].mean(0)),
    "shuffled": (["nf"], "nf", lambda e, a: a.reshape(WIDTH, -1).T),
    "folded": (["nf"], "f", lambda e, a: a.reshape(2, -1, WIDTH).prod(0).mean(0)),
    "positions": (["n"], "n", lambda e, a: a * jnp.arange(len(a)) / len(a)),
    "counted": (["n"], "n", lambda e, a: a * len(a) / 16),
    "counted s": (["s"], "s", lambda e, a: a / len(e["x"]) * 8),
    "unbiased": (["n"], "s", lambda e, a: a.var(ddof=1)),
    "mixing vjp": (["nf"], "nf", lambda e, a: _mixing_derivative(0)(a)),
    "order": (["n"], "s", lambda e, a: lax.scan(lambda c, r: (0.5 * c + r, None), 0.0, a)[0]),
    "last wins": (["nf"], "ff", lambda e, a: jnp.zeros((CLASSES, WIDTH)).at[e["y"]].set(a)),
    "neighbours": (["nf"], "nf", lambda e, a: a[(jnp.arange(len(a)) + 1) % len(a)]),
    "smooth": (["n"], "n", lambda e, a: jnp.convolve(a, jnp.ones(3) / 3, mode="same")),
    "branch": (["n", "s"], "n", lambda e, a, b: lax.cond(b > 0, jnp.tanh, jnp.sin, a)),
    "turns": (["n", "s"], "n", lambda e, a, b: a + _while(
        lambda c: c[0] < jnp.abs(b), lambda c: (c[0] + 1, jnp.tanh(c[1])), (0.0, a))),
    # Parameters alone.
    "decay": (["ff"], "s", lambda e, a: jnp.square(a).sum() / 16),
    "decay f": (["f"], "s", lambda e, a: jnp.square(a).sum() / 4),
    "product": (["ff", "f"], "f", lambda e, a, b: a @ b),
    "product ff": (["ff", "ff"], "ff", lambda e, a, b: a @ b / 2),
}  # fmt: skip
LOSSES = {
    "mean nf": ("nf", lambda e, a: a.mean()),
    "mean": ("n", lambda e, a: a.mean()),
    "by length": ("n", lambda e, a: a.sum() / len(a)),
    "number": ("s", lambda e, a: a),
    "sum": ("n", lambda e, a: a.sum()),
    "root": ("n", lambda e, a: jnp.sqrt(jnp.abs(a.mean()) + 1)),
    "median": ("n", lambda e, a: jnp.median(a)),
    "logsumexp": ("n", lambda e, a: jax.nn.logsumexp(a)),
    "squared": ("f", lambda e, a: jnp.square(a).sum()),
    "feature": ("f", lambda e, a: a.sum()),
}
RATIOS = {
    "weights": ("n", lambda e, a: ((a * e["m"]).sum(), e["m"].sum())),
    "count": ("n", lambda e, a: (a.sum(), len(a))),
    "means": ("n", lambda e, a: ((a * e["m"]).mean(), e["m"].mean())),
    "soft": ("n", lambda e, a: ((a * jax.nn.sigmoid(e["v"] * e["p"]["b"][0])).sum(),
                                jax.nn.sigmoid(e["v"] * e["p"]["b"][0]).sum())),
    "mixed": ("n", lambda e, a: (a.sum(), e["m"].mean())),
    "constant": ("n", lambda e, a: (a.sum(), 3.0)),
}  # fmt: skip
SPECS = ("mean", "sum", P("data"), P(None, "data"), P())


class Program:
    """A random program: a list of operations on earlier values, a loss and outputs."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        kinds = ["nf", "n", "f", "ff"]
        self.steps = []
        # Half of the programs use few operations that mix, so that many are right.
        names = list(OPERATIONS)
        mixing = names.index("mean 0")
        tame = [
            n for i, n in enumerate(names) if i < mixing or n in ("decay", "decay f", "product")
        ]
        few = rng.random() < 0.6
        for _ in range(rng.integers(2, 9)):
            choice = rng.random()
            if choice < 0.2:
                at = int(rng.integers(len(kinds)))
                name = rng.choice(list(UNARY))
                step, kind = (name, [at]), kinds[at]
            elif choice < 0.3:
                a = int(rng.integers(len(kinds)))
                b = int(rng.choice([i for i, k in enumerate(kinds) if k == kinds[a]]))
                step, kind = (rng.choice(list(BINARY)), [a, b]), kinds[a]
            else:
                name = str(rng.choice(tame if few and rng.random() < 0.85 else names))
                wanted, kind, _ = OPERATIONS[name]
                found = [[i for i, k in enumerate(kinds) if k == w] for w in wanted]
                if not all(found):
                    continue
                step = name, [int(rng.choice(f[-3:])) for f in found]
            self.steps.append(step)
            kinds.append(kind)
        self.ratio = rng.random() < 0.15
        ends = {n: v for n, v in (RATIOS if self.ratio else LOSSES).items() if v[0] in kinds}
        likely = ["mean nf", "mean", "by length"] if few and not self.ratio else list(ends)
        self.end = str(rng.choice([n for n in likely if n in ends]))
        self.last = [i for i, k in enumerate(kinds) if k == ends[self.end][0]][-1]
        self.outputs = [int(i) for i in rng.integers(len(kinds), size=rng.integers(0, 3))]
        self.specs = []
        for i in self.outputs:
            natural = P("data") if kinds[i][0] == "n" else SPECS[int(rng.choice([0, 1, 4]))]
            self.specs.append(natural if rng.random() < 0.8 else SPECS[rng.integers(len(SPECS))])
        self.wrapper = rng.choice(["none", "none", "checkpoint", "jit"])

    def __call__(self, params, batch):
        env = {"p": params, **batch}
        values = [batch["x"], batch["v"], params["b"], params["w"]]
        for name, operands in self.steps:
            given = [values[i] for i in operands]
            if name in UNARY:
                values.append(UNARY[name](*given))
            elif name in BINARY:
                values.append(BINARY[name](*given))
            else:
                values.append(OPERATIONS[name][2](env, *given))
        # Every parameter has a gradient.
        small = 0.01 * (batch["x"] @ params["w"] + params["b"]).mean(1)
        ends = RATIOS if self.ratio else LOSSES
        last = values[self.last]
        last = last + small if last.shape == small.shape else last
        return ends[self.end][1](env, last), [values[i] for i in self.outputs]

    def __str__(self):
        steps = "; ".join(f"{i + 4} = {name} {at}" for i, (name, at) in enumerate(self.steps))
        return (
            f"{steps}; {self.end} {self.last}; outputs {self.outputs} {self.specs} {self.wrapper}"
        )

    def function(self):
        wrap = {"none": lambda f: f, "checkpoint": jax.checkpoint, "jit": jax.jit}[self.wrapper]
        return wrap(lambda p, b: self(p, b))

    def plain(self, params, batch):
        """Returns what plain jit does: ((loss, outputs), gradients)."""
        loss = self.function()
        if not self.ratio:
            return jax.jit(jax.value_and_grad(loss, has_aux=True))(params, batch)

        def quotient(p, b):
            (total, count), aux = loss(p, b)
            return total / count, aux

        return jax.jit(jax.value_and_grad(quotient, has_aux=True))(params, batch)

    def compressed(self):
        """Returns value_and_grad with an exact code."""
        return cgx_jax.value_and_grad(
            self.function(),
            "data",
            cgx_jax.Identity(),
            mesh=mesh(),
            has_aux=True,
            aux_specs=self.specs,
            loss="ratio" if self.ratio else "mean",
        )


def difference(got, want):
    """Returns the largest error of a leaf, relative to its size."""
    worst = 0.0
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        if g.shape != w.shape:
            return np.inf
        if not np.array_equal(np.isfinite(g), np.isfinite(w)):
            return np.inf
        g, w = np.where(np.isfinite(w), g, 0), np.where(np.isfinite(w), w, 0)
        worst = max(worst, float(np.abs(g - w).max(initial=0) / (np.abs(w).max(initial=0) + 1e-2)))
    return worst


def run(seed):
    """Returns ("refused", why) or ("accepted", largest error) of a program."""
    with jax.numpy_dtype_promotion("standard"):
        return _run(Program(seed), seed)


def _run(program, seed):
    # In some programs each rank has one example.
    params, batch = data(ROWS if seed % 8 else WORLD)
    try:
        got = program.compressed()(params, batch)
    except (TypeError, ValueError) as error:
        if not str(error).startswith("value_and_grad: "):
            raise
        return "refused", str(error)
    return "accepted", difference(got, program.plain(params, batch))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", WORLD)
    found = {"accepted": 0, "refused": 0, "wrong": 0}
    for seed in range(options.seed, options.seed + options.count):
        kind, error = run(seed)
        found[kind] += 1
        if kind == "accepted" and error > TOLERANCE:
            found["wrong"] += 1
            print(f"wrong by {error:.3g}: seed {seed}: {Program(seed)}", flush=True)
        if seed % 100 == 99:
            jax.clear_caches()
    print(f"{options.count} programs from seed {options.seed}: {found}")


if __name__ == "__main__":
    main()
