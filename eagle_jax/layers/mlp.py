"""The gated MLP."""

import functools
from collections.abc import Callable

import jax
from flax import nnx

from eagle_jax.config import BlockConfig
from eagle_jax.layers.linear import Linear

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


class MLP(nnx.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, config: BlockConfig, *, dtype, rngs: nnx.Rngs, stack: tuple[int, ...] = ()):
        self.activation = config.activation
        shared = {"bias": config.mlp_bias, "dtype": dtype, "rngs": rngs, "stack": stack}
        self.gate_proj = Linear(config.hidden_size, config.mlp_size, **shared)
        self.up_proj = Linear(config.hidden_size, config.mlp_size, **shared)
        self.down_proj = Linear(config.mlp_size, config.hidden_size, **shared)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(ACTIVATIONS[self.activation](self.gate_proj(x)) * self.up_proj(x))
