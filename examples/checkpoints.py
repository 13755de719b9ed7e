"""Checkpoints of which each process writes its own part, for another number of processes."""

import json
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import cgx_jax


def placed(value: Any, sharding: NamedSharding) -> jax.Array:
    """Places a value that all processes have; `jax.device_put` would send it, to compare it."""
    if not getattr(value, "is_fully_addressable", True):
        return value  # as `init` made it, on the mesh
    host = np.asarray(value)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def own(array: jax.Array) -> np.ndarray:
    """Returns this process's rows of an array, or all of one that the ranks share."""
    return np.asarray(array.addressable_data(0))


def shared_bits(state: Any) -> int:
    """Returns a checksum of what the ranks share: the parameters, and part of the state."""
    shared = [x for x in jax.tree.leaves(state) if x.sharding.is_fully_replicated]
    return zlib.crc32(b"".join(own(x).tobytes() for x in shared))


def save(folder: Path, step: int, state: Any) -> bool:
    """Writes a checkpoint, completely or not at all; returns whether all ranks share its bits.

    Each rank writes what it holds, so no rank's state travels.
    """
    rank, world = jax.process_index(), jax.process_count()
    arrays = {str(i): own(leaf) for i, leaf in enumerate(jax.tree.leaves(state))}
    np.savez(folder / f"{step}.{rank}.npz", **arrays)
    # Once the checksums of all ranks are here, all of them have written.
    bits = multihost_utils.process_allgather(np.uint32(shared_bits(state))).tolist()
    agree = len(set(bits)) == 1
    if rank == 0 and agree:
        partial = folder / "partial.json"
        partial.write_text(json.dumps({"step": step, "world": world, "bits": bits[0]}))
        partial.replace(folder / "checkpoint.json")
        for part in folder.glob("*.npz"):
            if not part.name.startswith(f"{step}."):
                part.unlink()
    return agree


def restored(folder: Path, initial: Any, world: int) -> tuple[int, int | None, Any]:
    """Returns the next step, its checksum, and (params, opt_state) for `world` ranks."""
    if not (folder / "checkpoint.json").exists():
        return 0, None, initial
    saved = json.loads((folder / "checkpoint.json").read_text())
    parts = [np.load(folder / f"{saved['step']}.{rank}.npz") for rank in range(saved["world"])]
    leaves = [
        parts[0][str(i)] if spec == P() else np.concatenate([part[str(i)] for part in parts])
        for i, spec in enumerate(jax.tree.leaves(cgx_jax.state_specs(initial, "data")))
    ]
    params, opt_state = jax.tree.unflatten(jax.tree.structure(initial), leaves)
    return saved["step"], saved["bits"], (params, cgx_jax.resize_state(opt_state, world))
