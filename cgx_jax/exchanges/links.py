"""What joins the ranks of an axis, as far as devices say: for `exchange="auto"` without a profile.

All processes must come to the same answer without asking each other. So only what every process
knows of every device counts: its kind, and which devices share a node.
"""

from __future__ import annotations

import collections
import enum
import re
from typing import Any

import jax
import numpy as np

from cgx_jax import _compat
from cgx_jax.axes import Axes, in_groups

# Kinds of GPUs that have no NVLink, or only as a bridge between two.
_ON_PCIE = re.compile(
    r"geforce|rtx|titan|pcie|\bnvl\b|\b(t4g?|p4|p40|a2|a10g?|a16|a30|a40|l[24]|l20|l40s?)\b"
)

Groups = tuple[tuple[int, ...], ...]


class Link(enum.Enum):
    """The slowest link between ranks: inside a node, or a node's, of one or of several ranks."""

    NVLINK = "NVLink"
    PCIE = "PCIe"
    OWN = "a network, with one GPU per node"
    SHARED = "a network, with several GPUs per node, on NVLink"
    SHARED_PCIE = "a network, with several GPUs per node, on PCIe"

    @property
    def shared(self) -> bool:
        """Whether several ranks share the link of their node."""
        return self in (Link.SHARED, Link.SHARED_PCIE)


def between(axes: Axes) -> Link | None:
    """Returns the slowest link between ranks of `axes`, or None if the devices do not say.

    Where the mesh is not known, ranks are taken for one node's if a node has as many GPUs.
    """
    devices = jax.devices()
    nodes = collections.Counter(map(_node, devices))
    if None in nodes:
        return None
    lines = _lines(axes)
    if lines is None:
        most = max(nodes.values())
        crosses, alone = axes.world > most, most == 1
    else:
        apart = [len(set(map(_node, line))) for line in lines]
        crosses, alone = max(apart) > 1, min(apart) == axes.world
    if crosses and alone:
        return Link.OWN
    if all(_ON_PCIE.search(d.device_kind.lower()) for d in devices):
        return Link.SHARED_PCIE if crosses else Link.PCIE
    return Link.SHARED if crosses else Link.NVLINK


def nodes_of(axes: Axes) -> Groups | None:
    """Returns the indices of each node's ranks, if `axes` join several nodes of several GPUs each.

    It is None if the devices or the mesh are not known, and for nodes that differ in their ranks.
    """
    lines = _lines(axes)
    if lines is None or axes.groups is not None:
        return None
    found = set()
    for line in lines:
        ranks: dict[Any, list[int]] = {}
        for i, device in enumerate(line):
            ranks.setdefault(_node(device), []).append(i)
        found.add(tuple(map(tuple, ranks.values())) if None not in ranks else ())
    groups = found.pop()
    sizes = {len(group) for group in groups}
    if found or len(groups) < 2 or len(sizes) != 1 or sizes == {1}:
        return None
    return groups


def _lines(axes: Axes) -> np.ndarray | None:
    """Returns the devices of each group of ranks, [groups, world]; None without a known mesh."""
    mesh = _compat.concrete_mesh()
    if mesh is None or not set(axes.names) <= set(mesh.axis_names):
        return None
    return in_groups(mesh.devices, [mesh.axis_names.index(n) for n in axes.names], axes.groups)


def _node(device: Any) -> Any:
    """Returns which devices are joined without a network; None for all but GPUs of known nodes."""
    if device.platform != "gpu":
        return None
    # XLA counts hosts, or the NVLink domains of several hosts; -1 says that it does not know.
    node = getattr(device, "partition_index", getattr(device, "slice_index", -1))
    return None if node < 0 else node
