"""From files straight onto devices, one stored tensor at a time.

Each device's slice is read from the file by itself, transposed and converted there, and written in place into the
stacked array of its parameter, so the host never holds more than one stored tensor.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from eagle_jax.checkpoint.keymap import Piece, not_finite
from eagle_jax.checkpoint.tensors import TensorSource
from eagle_jax.sharding import Placement


def parameter_shapes(model: nnx.Module) -> dict[str, tuple[int, ...]]:
    """Canonical path -> shape of every parameter of a model, which may be abstract."""
    return {".".join(map(str, path)): tuple(leaf.shape) for path, leaf in nnx.to_flat_state(nnx.state(model))}


def with_parameters(model: nnx.Module, values: Mapping[str, jax.Array]) -> nnx.Module:
    """The model with these arrays, by canonical path, as its parameters."""
    graph, state = nnx.split(model)
    filled = [(path, leaf.replace(values[".".join(map(str, path))])) for path, leaf in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(filled))


def common_dtype(source: TensorSource, pieces: Sequence[Piece]) -> np.dtype:
    """The dtype that most of the model's elements are stored in.

    A model computes in one dtype; files that keep a few tensors (norms) wider are read in the dtype of the rest.
    """
    elements: Counter[np.dtype] = Counter()
    for piece in pieces:
        elements[source.info(piece.name).dtype] += int(np.prod(piece.shape))
    return elements.most_common(1)[0][0]


def place(
    source: TensorSource,
    pieces: Sequence[Piece],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: np.dtype,
    placement: Placement | None,
    head_dim: int,
) -> dict[str, jax.Array]:
    """Reads every piece onto its devices.

    Args:
      source: the files, already checked against `pieces`.
      pieces: from `keymap.plan`.
      shapes: canonical path -> shape.
      dtype: of every parameter.
      placement: where parameters live; None is the default device.
      head_dim: keeps heads whole when they are split.

    Returns:
      Canonical path -> array.

    Raises:
      CheckpointError: a tensor is not finite, or a file cannot be read.
    """
    shardings: dict[str, Sharding] = {
        path: SingleDeviceSharding(jax.local_devices()[0])
        if placement is None
        else placement.parameter(path, shape, head_dim)
        for path, shape in shapes.items()
    }
    arrays: dict[str, jax.Array] = {}
    damaged = []
    for piece in pieces:
        sharding = shardings[piece.path]
        stored = _read(source, piece, _stored_sharding(sharding, piece))
        if piece.layer is None:
            convert = _converter(piece.transpose, dtype, sharding)
            arrays[piece.path], finite = convert(stored)
        else:
            if piece.path not in arrays:
                arrays[piece.path] = _allocator(tuple(shapes[piece.path]), dtype, sharding)()
            arrays[piece.path], finite = _writer(piece.transpose, sharding)(arrays[piece.path], stored, piece.layer)
        # Waiting here also keeps the next tensor out of memory until this one has left the host.
        if not bool(finite):
            damaged.append(piece.name)
    if damaged:
        raise not_finite(source, damaged)
    return arrays


def _read(source: TensorSource, piece: Piece, sharding: Sharding) -> jax.Array:
    """The stored tensor, each distinct slice of it read once."""
    slices: dict[tuple[tuple[int | None, int | None], ...], np.ndarray] = {}

    def fetch(index: tuple[slice, ...] | None) -> np.ndarray:
        key = tuple((part.start, part.stop) for part in index or ())
        if key not in slices:
            slices[key] = source.read(piece.name, index)
        return slices[key]

    return jax.make_array_from_callback(piece.shape, sharding, fetch, dtype=source.info(piece.name).dtype)


def _stored_sharding(sharding: Sharding, piece: Piece) -> Sharding:
    """The sharding of one stored tensor: no layer axis, and the axes in the order of the file."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    axes = tuple(sharding.spec) + (None,) * (len(piece.shape) + (piece.layer is not None) - len(sharding.spec))
    axes = axes[1:] if piece.layer is not None else axes
    return NamedSharding(sharding.mesh, PartitionSpec(*(axes[::-1] if piece.transpose else axes)))


# Cached, so that a second model of the same shapes compiles nothing.
@functools.cache
def _converter(transpose: bool, dtype: np.dtype, sharding: Sharding):
    def convert(stored: jax.Array) -> tuple[jax.Array, jax.Array]:
        value = (stored.T if transpose else stored).astype(dtype)
        return value, jnp.isfinite(value).all()

    return jax.jit(convert, out_shardings=(sharding, None))


@functools.cache
def _writer(transpose: bool, sharding: Sharding):
    def write(stack: jax.Array, stored: jax.Array, layer: jax.Array) -> tuple[jax.Array, jax.Array]:
        value = (stored.T if transpose else stored).astype(stack.dtype)
        return jax.lax.dynamic_update_index_in_dim(stack, value, layer, axis=0), jnp.isfinite(value).all()

    return jax.jit(write, donate_argnums=0, out_shardings=(sharding, None))


@functools.cache
def _allocator(shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding):
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)
