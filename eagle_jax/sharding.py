"""Where arrays live on a `data x tensor` mesh: one table from logical axes to mesh axes, one from parameters to axes.

Parameters, caches and inputs are placed by these tables; the mesh has automatic axes, so the compiler derives the rest.
"""

from __future__ import annotations

import dataclasses
import fnmatch

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from eagle_jax.config import BlockConfig
from eagle_jax.errors import ConfigError

DATA, TENSOR = "data", "tensor"

# Logical axis -> mesh axis. An axis whose size the mesh axis does not divide is replicated.
RULES: dict[str, str] = {
    "batch": DATA,
    "heads": TENSOR,
    "kv_heads": TENSOR,
    "mlp": TENSOR,
    "vocab": TENSOR,
}

# Canonical parameter path -> logical axes, counted from the last axis (stacked layer axes stay unsharded).
PARAMETERS: dict[str, tuple[str | None, ...]] = {
    "*.q_proj.kernel": (None, "heads"),
    "*.k_proj.kernel": (None, "kv_heads"),
    "*.v_proj.kernel": (None, "kv_heads"),
    "*.q_proj.bias": ("heads",),
    "*.k_proj.bias": ("kv_heads",),
    "*.v_proj.bias": ("kv_heads",),
    "*.o_proj.kernel": ("heads", None),
    "*.gate_proj.kernel": (None, "mlp"),
    "*.up_proj.kernel": (None, "mlp"),
    "*.gate_proj.bias": ("mlp",),
    "*.up_proj.bias": ("mlp",),
    "*.down_proj.kernel": ("mlp", None),
    "lm_head.weight": ("vocab", None),
    "embed.weight": ("vocab", None),
}


@dataclasses.dataclass(frozen=True)
class Placement:
    """A mesh, and how one model is laid out on it.

    Attributes:
      mesh: axes `data` and `tensor`.
      replicated: keep every parameter and cache of this model whole on each device (a small drafter beside a sharded
        target) instead of splitting it over `tensor`.
    """

    mesh: Mesh
    replicated: bool = False

    def parameter(self, path: str, shape: tuple[int, ...], head_dim: int) -> NamedSharding:
        """Sharding of a parameter by canonical path; `head_dim` keeps heads whole."""
        axes: tuple[str | None, ...] = ()
        if not self.replicated:
            axes = next((axes for pattern, axes in PARAMETERS.items() if fnmatch.fnmatchcase(path, pattern)), ())
        axes = (None,) * (len(shape) - len(axes)) + axes
        spec = []
        for size, axis in zip(shape, axes, strict=True):
            units = size // head_dim if axis in ("heads", "kv_heads") else size
            spec.append(mesh_axis(self.mesh, axis, units))
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def cache(self, batch: int, num_kv_heads: int) -> NamedSharding:
        """Sharding of a [L, B, K, S, h] buffer."""
        heads = None if self.replicated else mesh_axis(self.mesh, "kv_heads", num_kv_heads)
        return NamedSharding(self.mesh, PartitionSpec(None, mesh_axis(self.mesh, "batch", batch), heads, None, None))


def make_mesh(data: int = 1, tensor: int = 1, devices: list[jax.Device] | None = None) -> Mesh:
    """A `data x tensor` mesh over the first data * tensor devices.

    Raises:
      ConfigError: fewer devices than the mesh needs, or a size below 1.
    """
    devices = jax.devices() if devices is None else devices
    if data < 1 or tensor < 1:
        raise ConfigError(f"mesh sizes must be at least 1, found data={data}, tensor={tensor}")
    if data * tensor > len(devices):
        raise ConfigError(f"a {data} x {tensor} mesh needs {data * tensor} devices, {len(devices)} are there")
    grid = np.array(devices[: data * tensor]).reshape(data, tensor)
    return Mesh(grid, (DATA, TENSOR), axis_types=(AxisType.Auto, AxisType.Auto))


def check_divides(block: BlockConfig, placement: Placement, what: str) -> None:
    """Raises ConfigError when `tensor` does not divide the query heads or the MLP: those are never replicated."""
    size = placement.mesh.shape[TENSOR]
    for name, value in (("query heads", block.num_heads), ("MLP width", block.mlp_size)):
        if value % size:
            raise ConfigError(f"tensor={size} does not divide the {what}'s {name} ({value})")


def mesh_axis(mesh, axis: str | None, units: int) -> str | None:
    """The mesh axis of a logical axis of `units` indivisible units, or None when it must be replicated."""
    name = RULES.get(axis) if axis is not None else None
    return name if name is not None and units % mesh.shape[name] == 0 else None


def place(model: nnx.Module, placement: Placement) -> None:
    """Moves a model's arrays to where `placement` wants them. Place a drafter before it borrows a target's tables."""
    head_dim = model.config.block.head_dim

    def move(path: tuple, leaf: jax.Array) -> jax.Array:
        name = ".".join(str(part) for part in path)
        return jax.device_put(leaf, placement.parameter(name, leaf.shape, head_dim))

    nnx.update(model, nnx.map_state(lambda path, leaf: leaf.replace(move(path, leaf[...])), nnx.state(model)))
