"""The letters of the code base and the records that cross its boundaries.

`B` batch, `T` new tokens this call, `S` cache slots, `D` target width, `H` drafter width, `N` query heads,
`K` kv heads, `h` head dim, `F` MLP width, `V` target vocabulary, `U` draft vocabulary, `A` captured target layers,
`L` layers, `G` draft tokens per round, `M` nodes of a draft tree (a chain of G draft tokens has M = G + 1).
"""

from __future__ import annotations

import dataclasses
import typing

import jax

T = typing.TypeVar("T")


@typing.dataclass_transform(frozen_default=True)
def record(cls: type[T]) -> type[T]:
    """A frozen dataclass that JAX treats as a pytree of its fields."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True)(cls))


@record
class NewKV:
    """Keys and values of the tokens of one call, before anything is written to a cache.

    k, v: [L, B, K, T, h]; keys are already rotated.
    """

    k: jax.Array
    v: jax.Array


@record
class KVCache:
    """Keys and values of committed tokens. Slot s of a row holds position s.

    k, v: [L, B, K, S, h]. The number of valid slots per row travels beside the cache, never inside it, because target
    and drafter advance together.
    """

    k: jax.Array
    v: jax.Array

    @property
    def slots(self) -> int:
        return self.k.shape[3]


@record
class TargetOutput:
    """One forward pass of the target.

    logits: [B, T, V] float32, or None when they were not asked for.
    hidden: [B, T, D], after the final norm.
    aux: [B, T, A, D], the residual stream at the captured boundaries, in the order of the ids; None without ids.
    kv: keys and values of the T tokens.
    """

    logits: jax.Array | None
    hidden: jax.Array
    aux: jax.Array | None
    kv: NewKV


@record
class DrafterOutput:
    """One forward pass of the drafter.

    output: [B, T, H], the normed state the head reads.
    feedback: [B, T, H], the state to feed to the next draft step.
    kv: keys and values of the T tokens.
    """

    output: jax.Array
    feedback: jax.Array
    kv: NewKV


@record
class DraftTree:
    """Draft tokens as a tree; a chain is a tree with one branch. Node 0 is the last emitted token.

    tokens: [B, M] target ids.
    depth: [B, M] distance from node 0.
    ancestors: [B, M, M] bool; [b, i, j] says that j is i or one of its ancestors.
    """

    tokens: jax.Array
    depth: jax.Array
    ancestors: jax.Array


@record
class VerifyResult:
    """What the target made of a DraftTree whose longest branch has G draft tokens.

    tokens: [B, G + 1] emitted tokens: the accepted draft tokens, then one of the target's own; the rest is undefined.
    path: [B, G + 1] tree nodes whose keys, values and states are kept, node 0 first; the rest is undefined.
    count: [B] number of valid entries of both, 1 .. G + 1.
    """

    tokens: jax.Array
    path: jax.Array
    count: jax.Array


@record
class Confirmed:
    """Target states that the drafter has not seen yet, each with the token that follows it.

    tokens: [B, P]; tokens[b, i] follows the position of aux[b, i].
    aux: [B, P, A, D].
    count: [B] number of valid entries, 1 .. P (0 in rows that have ended).
    """

    tokens: jax.Array
    aux: jax.Array
    count: jax.Array
