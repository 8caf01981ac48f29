"""Training-time test (EAGLE-3, arXiv:2503.01840): the drafter is unrolled as it will be when it drafts.

Slot t pairs the target's state at position t with token t + 1. Step k keeps the slot and moves everything else along:
it stands at position t + k, is given token t + 1 + k of the data (teacher forcing) and the state that step k - 1 fed
back in the same slot, and sees the step-0 keys of slots up to t and its own slot's keys of steps 1 .. k. So each slot
is one draft from its own prefix, and all slots run side by side. Its output speaks of token t + 2 + k.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from eagle_jax.layers.attention import Attention
from eagle_jax.layers.rotary import rotary_tables
from eagle_jax.trainer.batch import Batch
from pallas_kernels.ttt_attention import ttt_attention


def unroll(drafter, aux: jax.Array, batch: Batch, steps: int, *, remat: bool = False) -> tuple[jax.Array, jax.Array]:
    """Runs `steps` TTT steps on every slot.

    Args:
      drafter: bound to the target's embedding where it has none of its own.
      aux: [B, T, A, D] captured target states.
      batch: tokens, documents and positions; slots that run out of their document's tokens compute what nobody reads.
      steps: K >= 1.
      remat: recompute each step in the backward pass instead of keeping its activations.

    Returns:
      (outputs [B, K, T, H], feedback RMS [K] of the state each step feeds on). Output [b, k, t] is the state that the
      head reads in slot t at step k.
    """
    block = drafter.config.block
    tables = [rotary_tables(block.rotary, block.head_dim, batch.positions + k) for k in range(steps)]

    def step(k: int, state: jax.Array, first: list, own: list):
        """One step. `first` holds each block's keys and values of step 0, `own` those of later steps."""
        cos, sin = tables[k]

        def attend(i: int, attention: Attention, x: jax.Array):
            q, key, value = attention.project(x, cos, sin)
            keys, values, later = key, value, None
            if k > 0:
                keys, values = first[i]
                own_keys, own_values = zip(*own[i], (key, value), strict=True)
                later = jnp.stack(own_keys, axis=2), jnp.stack(own_values, axis=2)
            mixed = ttt_attention(q, keys, values, batch.documents, own=later, window=block.sliding_window)
            return attention.output(mixed), (key, value)

        tokens = jnp.roll(batch.tokens, -1 - k, axis=1)
        return drafter.run_blocks(state, drafter.embed_tokens(tokens), attend)

    outputs, sizes = [], []
    state = drafter.fuse(aux)
    first: list = []
    own: list = [[] for _ in range(drafter.config.num_layers)]
    for k in range(steps):
        run = jax.checkpoint(step, static_argnums=(0,)) if remat else step
        output, state, kept = run(k, state, first, own)
        if k == 0:
            first = kept
        else:
            own = [[*earlier, new] for earlier, new in zip(own, kept, strict=True)]
        outputs.append(output)
        in_use = (batch.documents > 0)[..., None]
        mean_square = jnp.where(in_use, jnp.square(state.astype(jnp.float32)), 0).mean() / jnp.maximum(
            in_use.mean(), 1e-9
        )
        sizes.append(jnp.sqrt(mean_square))
    return jnp.stack(outputs, axis=1), jax.lax.stop_gradient(jnp.stack(sizes))


def by_teacher(outputs: jax.Array) -> jax.Array:
    """[B, K, T, H] by slot -> by the teacher's position: step k of slot t is compared with the target at t + 1 + k."""
    T = outputs.shape[2]
    moved = [jnp.pad(outputs[:, k], ((0, 0), (1 + k, 0), (0, 0)))[:, :T] for k in range(outputs.shape[1])]
    return jnp.stack(moved, axis=1)
