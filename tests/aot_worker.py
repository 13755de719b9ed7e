"""Compiles a training step for eight H100 with XLA's ahead-of-time compiler, without a GPU.

    python aot_worker.py EXCHANGE STYLE

STYLE is "end" (one pmean_compressed of all gradients), "sparse" (the same with TopK), "streams"
(the same with Quantize on four NCCL streams), "one_shot" (the same in one phase), "backward"
(reduce_in_backward), "sharded" (weights are gathered, gradients scattered) or "units" (what is
recommended under Adam). Prints the optimized module. Needs JAX's CUDA plugin on the path, and
JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import cgx_jax
from cgx_jax.exchanges.experimental import Peer

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84978434048
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
WIDTH, LAYERS = 2048, 4

exchange, style = sys.argv[1:]
exchange = Peer() if exchange == "peer" else exchange
topology = topologies.get_topology_desc(
    platform="cuda", topology_name="h100x8", target_config=H100, topology="1 x 1 x 8"
)
mesh = Mesh(np.array(topology.devices), ("data",))
compressor = cgx_jax.compressors.TopK() if style == "sparse" else cgx_jax.Quantize(bits=4)


def loss(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean(x)


def step(weights, x):
    if style in ("end", "sparse", "streams", "one_shot"):
        varying = jax.lax.pcast(weights, "data", to="varying")
        grads = jax.grad(loss)(varying, x)
        way = cgx_jax.exchanges.Nccl(streams=4) if style == "streams" else exchange
        how = "gather_sum" if style == "one_shot" else None
        grads = cgx_jax.pmean_compressed(grads, "data", compressor, exchange=way, reduction=how)
    elif style == "sharded":
        over = {"tiled": True, "exchange": exchange}
        whole = [cgx_jax.all_gather_compressed(w, "data", compressor, **over) for w in weights]
        grads = [
            cgx_jax.psum_scatter_compressed(g, "data", compressor, **over)
            for g in jax.grad(loss)(whole, x)
        ]
    else:

        def hooked(weights):
            weights = cgx_jax.reduce_in_backward(weights, "data", compressor, exchange=exchange)
            return jax.lax.pmean(loss(weights, x), "data")

        grads = jax.grad(hooked)(weights)
    return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)]


def array(shape, spec):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))


of_weights = P("data") if style == "sharded" else P()
weights = [array((WIDTH, WIDTH), of_weights)] * LAYERS
x = array((8 * WIDTH, WIDTH), P("data"))
if style == "units":
    tx = cgx_jax.sync_gradients(
        "data",
        cgx_jax.Quantize(bits=4, rotation=True),
        precondition=cgx_jax.SecondMoment(),
        exchange=exchange,
        mesh=mesh,
    )
    state = jax.eval_shape(tx.init, weights)
    at = cgx_jax.state_specs(state, "data")

    def step(weights, state, x):
        grads = jax.grad(loss)(jax.lax.pcast(weights, "data", to="varying"), x)
        means, state = tx.update(grads, state)
        return [w - 0.1 * g for w, g in zip(weights, means, strict=True)], state

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), at, P("data")), out_specs=(P(), at))
    like = jax.tree.map(
        lambda s, spec: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=NamedSharding(mesh, spec)),
        state,
        at,
    )
    lowered = jax.jit(mapped).lower(weights, like, x)
else:
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(of_weights, P("data")), out_specs=of_weights)
    lowered = jax.jit(mapped).lower(weights, x)
print(lowered.compile().as_text())
