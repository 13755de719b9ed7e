"""Trains a small model on one GPU with compressed gradients; its step is compiled once.

    python tests/gpu/training.py OUT.jsonl [--platform cpu]

A single device has no peers, so encode and decode take the place of the exchange: every gradient
makes the round trip through the kernels. The losses are compared with the same steps on the CPU.
"""

import argparse
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import ranks

from cgx_jax import Quantize

STEPS = 60


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--platform", default="cuda", help="cpu tries the script itself")
    arguments = parser.parse_args()
    compressor = Quantize(bits=4)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((512, 64)).astype(np.float32)
    target = np.tanh(x @ rng.standard_normal((64, 8)).astype(np.float32))
    start = [(rng.standard_normal(shape) / 8).astype(np.float32) for shape in ((64, 256), (256, 8))]

    def loss(weights, x, target):
        return jnp.mean((jnp.tanh(x @ weights[0]) @ weights[1] - target) ** 2)

    @jax.jit
    def step(weights, x, target):
        value, grads = jax.value_and_grad(loss)(weights, x, target)
        sent = [compressor.decode(compressor.encode(g), g.shape, g.dtype) for g in grads]
        return [w - 0.5 * g for w, g in zip(weights, sent, strict=True)], value

    losses = {}
    for name, platform in (("gpu", arguments.platform), ("cpu", "cpu")):
        device = jax.devices(platform)[0]
        weights, *data = jax.device_put((start, x, target), device)
        losses[name] = []
        for _ in range(STEPS):
            weights, value = step(weights, *data)
            losses[name].append(float(value))
    first, last = losses["gpu"][0], losses["gpu"][-1]
    gap = abs(last - losses["cpu"][-1]) / losses["cpu"][-1]
    rows = [{"on": name, "first": own[0], "last": own[-1]} for name, own in losses.items()]
    ranks.add_run(arguments.out, rows, check="training", steps=STEPS, gap=gap)
    print(f"loss {first:.4f} -> {last:.4f} on the GPU; {gap:.1%} from the CPU's")
    return 0 if last < first / 4 and gap < 0.1 else 1


if __name__ == "__main__":
    sys.exit(main())
