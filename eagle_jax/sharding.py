"""Where arrays live on a `data x fsdp x tensor` mesh: one table from logical axes to mesh axes, one from parameters to
axes.

Rows are split over `data` and `fsdp`; heads, MLP width and vocabulary over `tensor`; the other side of each matrix over
`fsdp`, so that parameters and optimiser shrink with it (they are gathered as they are used). Parameters, caches and
inputs are placed by these tables; the mesh has automatic axes, so the compiler derives the rest.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from eagle_jax.config import BlockConfig
from eagle_jax.errors import ConfigError

DATA, FSDP, TENSOR = "data", "fsdp", "tensor"
ROWS = PartitionSpec((DATA, FSDP))

# Logical axis -> mesh axis. An axis whose size the mesh axis does not divide is replicated.
RULES: dict[str, str | tuple[str, ...]] = {
    "batch": (DATA, FSDP),
    "width": FSDP,
    "heads": TENSOR,
    "kv_heads": TENSOR,
    "mlp": TENSOR,
    "vocab": TENSOR,
}

# Canonical parameter path -> logical axes, counted from the last axis (stacked layer axes stay unsharded).
PARAMETERS: dict[str, tuple[str | None, ...]] = {
    "*.q_proj.kernel": ("width", "heads"),
    "*.k_proj.kernel": ("width", "kv_heads"),
    "*.v_proj.kernel": ("width", "kv_heads"),
    "*.q_proj.bias": ("heads",),
    "*.k_proj.bias": ("kv_heads",),
    "*.v_proj.bias": ("kv_heads",),
    "*.o_proj.kernel": ("heads", "width"),
    "*.gate_proj.kernel": ("width", "mlp"),
    "*.up_proj.kernel": ("width", "mlp"),
    "*.gate_proj.bias": ("mlp",),
    "*.up_proj.bias": ("mlp",),
    "*.down_proj.kernel": ("mlp", "width"),
    "fc.kernel": ("width", None),
    "lm_head.weight": ("vocab", "width"),
    "embed.weight": ("vocab", "width"),
}


@dataclasses.dataclass(frozen=True)
class Placement:
    """A mesh, and how one model is laid out on it.

    Attributes:
      mesh: axes `data`, `fsdp` and `tensor`.
      replicated: keep every parameter and cache of this model whole on each device (a small drafter beside a sharded
        target) instead of splitting it over `fsdp` and `tensor`.
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


def make_mesh(data: int = 1, tensor: int = 1, fsdp: int = 1, devices: list[jax.Device] | None = None) -> Mesh:
    """A `data x fsdp x tensor` mesh over the first data * fsdp * tensor devices; neighbours share a `tensor` group.

    Raises:
      ConfigError: fewer devices than the mesh needs, or a size below 1.
    """
    devices = jax.devices() if devices is None else devices
    sizes = {DATA: data, FSDP: fsdp, TENSOR: tensor}
    if min(sizes.values()) < 1:
        raise ConfigError(f"mesh sizes must be at least 1, found {', '.join(f'{k}={v}' for k, v in sizes.items())}")
    needed = data * fsdp * tensor
    if needed > len(devices):
        shape = f"{data} x {tensor}" if fsdp == 1 else f"{data} x {fsdp} x {tensor}"
        raise ConfigError(f"a {shape} mesh needs {needed} devices, {len(devices)} are there")
    grid = np.array(devices[:needed]).reshape(data, fsdp, tensor)
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * 3)


def row_shards(mesh: Mesh) -> int:
    """Into how many parts the rows of a batch are split."""
    return mesh.shape[DATA] * mesh.shape[FSDP]


def check_divides(block: BlockConfig, placement: Placement, what: str) -> None:
    """Raises ConfigError when `tensor` does not divide the query heads or the MLP: those are never replicated."""
    size = placement.mesh.shape[TENSOR]
    for name, value in (("query heads", block.num_heads), ("MLP width", block.mlp_size)):
        if value % size:
            raise ConfigError(f"tensor={size} does not divide the {what}'s {name} ({value})")


def mesh_axis(mesh: Mesh, axis: str | None, units: int) -> str | tuple[str, ...] | None:
    """The mesh axis of a logical axis of `units` indivisible units, or None when it stays whole."""
    name = RULES.get(axis) if axis is not None else None
    if name is None:
        return None
    size = math.prod(mesh.shape[part] for part in ((name,) if isinstance(name, str) else name))
    return name if size > 1 and units % size == 0 else None


def place(model: nnx.Module, placement: Placement) -> None:
    """Moves a model's arrays to where `placement` wants them. Place a drafter before it borrows a target's tables."""
    head_dim = model.config.block.head_dim

    def move(path: tuple, leaf: jax.Array) -> jax.Array:
        name = ".".join(str(part) for part in path)
        return jax.device_put(leaf, placement.parameter(name, leaf.shape, head_dim))

    nnx.update(model, nnx.map_state(lambda path, leaf: leaf.replace(move(path, leaf[...])), nnx.state(model)))
