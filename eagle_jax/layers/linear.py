"""Linear maps and vocabulary tables."""

import jax
import jax.numpy as jnp
from flax import nnx

INIT_STD = 0.02  # what the Llama family starts from; only random models use it


class Linear(nnx.Module):
    """x @ kernel (+ bias). The kernel is [in, out]: both the CPU's and the TPU's matrix units read it without a copy.

    `stack` prepends axes (a layer axis) to the stored arrays; a scan takes them off before the call.
    """

    def __init__(
        self, in_size: int, out_size: int, *, bias: bool, dtype: jnp.dtype, rngs: nnx.Rngs, stack: tuple[int, ...] = ()
    ):
        kernel = jax.random.normal(rngs.params(), (*stack, in_size, out_size), jnp.float32) * INIT_STD
        self.kernel = nnx.Param(kernel.astype(dtype))
        self.bias = nnx.Param(jnp.zeros((*stack, out_size), dtype)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jnp.einsum("...i,io->...o", x, self.kernel[...])
        if self.bias is not None:
            y = y + jnp.expand_dims(self.bias[...], tuple(range(y.ndim - 1)))
        return y


class VocabTable(nnx.Module):
    """A [vocabulary, width] table that embeds tokens, or scores a state against each of its rows."""

    def __init__(self, vocab_size: int, width: int, *, dtype: jnp.dtype, rngs: nnx.Rngs):
        table = jax.random.normal(rngs.params(), (vocab_size, width), jnp.float32) * INIT_STD
        self.weight = nnx.Param(table.astype(dtype))

    @classmethod
    def holding(cls, weight: jax.Array) -> "VocabTable":
        """A table around an array that is there already."""
        table = nnx.eval_shape(lambda: cls(*weight.shape, dtype=weight.dtype, rngs=nnx.Rngs(0)))
        table.weight.set_value(weight)
        return table

    def embed(self, tokens: jax.Array) -> jax.Array:
        """[...] ids -> [..., width]. Ids must lie in [0, vocabulary): the host checks them, a gather would clamp."""
        return jnp.take(self.weight[...], tokens, axis=0, mode="clip")

    def scores(self, x: jax.Array) -> jax.Array:
        """[..., width] -> [..., vocabulary] in float32."""
        # The table on the left: with few tokens, the CPU's matrix product would otherwise repack the whole table.
        scores = jnp.einsum("vd,...d->v...", self.weight[...], x, preferred_element_type=jnp.float32)
        return jnp.moveaxis(scores, 0, -1)
