"""What a training step is given, and which of its predictions count."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from eagle_jax.records import record

# Which token's mask decides whether a prediction is trained on, as an offset from the teacher's position s, whose
# logits speak of token s + 1: that token itself; the teacher's own (speculators, Model-Optimizer); or the one before
# (SafeAILab, SpecForge).
ALIGNMENTS = {"predicted": 1, "teacher": 0, "safeailab": -1}
Alignment = Literal["predicted", "teacher", "safeailab"]


@record
class Batch:
    """Packed documents.

    tokens: [B, T] ids; mask: [B, T] bool, tokens of assistant answers.
    documents: [B, T] number of each token's document, 0 for padding; a document's tokens are adjacent.
    positions: [B, T] within each document.
    """

    tokens: jax.Array
    mask: jax.Array
    documents: jax.Array
    positions: jax.Array


@record
class Features:
    """What the target makes of a batch.

    aux: [B, T, A, D] captured states; hidden: [B, T, D] final states, after the norm.
    best: [B, T] draft id of the target's most likely next token, -1 when the draft vocabulary lacks it.
    log_mass: [B, T] log-sum-exp of the target's logits over its whole vocabulary.
    """

    aux: jax.Array
    hidden: jax.Array
    best: jax.Array
    log_mass: jax.Array


def supervised(batch: Batch, steps: int, alignment: Alignment = "predicted") -> jax.Array:
    """Which predictions count: [B, K, T] bool for K = `steps`, by TTT step and by the teacher's position.

    Step k meets the teacher of position s in slot s - 1 - k (slot t starts from the target's state at t and is given
    the tokens t + 1 .. t + 1 + k). It counts when that slot and the token that `alignment` names lie in the same
    document, and that token's mask is set.
    """
    T = batch.tokens.shape[1]
    position = jnp.arange(T)

    def at(array: jax.Array, offset: int) -> jax.Array:
        """[B, T] values `offset` places later, 0 outside."""
        moved = jnp.roll(array, -offset, axis=1)
        inside = (position + offset >= 0) & (position + offset < T)
        return jnp.where(inside[None, :], moved, 0)

    here, named = batch.documents, ALIGNMENTS[alignment]
    counts = (here > 0) & (at(here, named) == here) & (at(batch.mask.astype(jnp.int32), named) > 0)
    return jnp.stack([counts & (at(here, -1 - k) == here) for k in range(steps)], axis=1)
