"""Which draft tokens the target accepts."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from eagle_jax.records import DraftTree, VerifyResult


def accept_greedy(tree: DraftTree, logits: jax.Array, max_depth: int) -> VerifyResult:
    """Follows the target's argmax from the root for as long as the tree has it.

    Args:
      tree: M nodes.
      logits: [B, M, V] of the target at every node; ties go to the lowest id.
      max_depth: draft tokens on the longest branch (G).

    Returns:
      Exactly the tokens that plain greedy decoding would have produced, one more than were accepted.
    """
    predicted = jnp.argmax(logits, axis=-1).astype(jnp.int32)  # [B, M]

    def descend(carry, _):
        node, alive, depth = carry  # [B] each
        wanted = jnp.take_along_axis(predicted, node[:, None], axis=1)
        is_child = jnp.take_along_axis(tree.ancestors, node[:, None, None], axis=2)[..., 0]
        fits = is_child & (tree.depth == depth[:, None] + 1) & (tree.tokens == wanted)  # [B, M]
        alive = alive & fits.any(axis=1)
        node = jnp.where(alive, jnp.argmax(fits, axis=1).astype(jnp.int32), node)
        return (node, alive, depth + 1), (node, alive)

    root = jnp.zeros(tree.tokens.shape[0], jnp.int32)
    _, (nodes, accepted) = jax.lax.scan(
        descend, (root, jnp.ones_like(root, bool), root), None, length=max_depth
    )  # [G, B] each
    path = jnp.concatenate([root[:, None], nodes.T], axis=1)
    return VerifyResult(
        tokens=jnp.take_along_axis(predicted, path, axis=1),
        path=path,
        count=1 + accepted.sum(axis=0, dtype=jnp.int32),
    )
