"""From a drafter's unrolled outputs to one number, and to the counts that metrics are made of."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from eagle_jax.records import record
from eagle_jax.trainer.batch import Alignment, Batch, Features, supervised
from eagle_jax.trainer.ttt import by_teacher, unroll
from pallas_kernels.soft_cross_entropy import soft_cross_entropy

Reduction = Literal["supervised", "positions", "sequences"]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class LossSettings:
    """What is minimised.

    Attributes:
      steps: K, TTT steps.
      kind: see `soft_cross_entropy`.
      step_decay: step k weighs step_decay ** k.
      reduction: "supervised" is the mean over every prediction that counts, by weight, over the whole global batch;
        "positions" divides by all B T positions, counted or not (SafeAILab, SpecForge); "sequences" is the mean of each
        row's means (speculators). Learning rates do not carry over from one to another.
      alignment: see `batch.ALIGNMENTS`.
      only_draft_vocab: positions whose most likely target token lies outside the draft vocabulary weigh nothing.
      remat: recompute each TTT step in the backward pass.
      block: positions per block of the loss.
    """

    steps: int = Field(default=7, ge=1)
    kind: Literal["kl", "ce", "lk-alpha", "lk-lambda"] = "kl"
    step_decay: float = Field(default=0.8, gt=0, le=1)
    reduction: Reduction = "supervised"
    alignment: Alignment = "predicted"
    only_draft_vocab: bool = True
    remat: bool = True
    block: int = Field(default=128, ge=1)


@record
class Counts:
    """Sums over a batch, by TTT step [K]; batches, and hosts, add up.

    loss: weighted by nothing; weighted: predictions the loss is taken of.
    eligible: predictions that count by mask; hits: those whose best draft token is the target's.
    prefix_hits: hits that follow hits at all earlier steps of their slot.
    feedback: root mean square of the state fed on, times the rows of the batch; rows: [] rows of the batch.
    """

    loss: jax.Array
    weighted: jax.Array
    eligible: jax.Array
    hits: jax.Array
    prefix_hits: jax.Array
    feedback: jax.Array
    rows: jax.Array


def total_loss(
    drafter, rows: jax.Array, batch: Batch, features: Features, settings: LossSettings
) -> tuple[jax.Array, tuple[jax.Array, Counts]]:
    """The weighted sum of a batch's losses, with what to divide it by once all batches are in.

    Args:
      drafter: bound, with its own head.
      rows: [U, D] rows of the target's head for the draft vocabulary.

    Returns:
      (sum, (divisor, counts)).
    """
    outputs, feedback = unroll(drafter, features.aux, batch, settings.steps, remat=settings.remat)
    counts = supervised(batch, settings.steps, settings.alignment)  # [B, K, T]
    in_vocab = (features.best >= 0)[:, None, :]
    weighted = counts & in_vocab if settings.only_draft_vocab else counts
    step_weights = jnp.asarray([settings.step_decay**k for k in range(settings.steps)], jnp.float32)
    weights = weighted * step_weights[None, :, None]
    if settings.reduction == "supervised":
        divisor = weights.sum()
    elif settings.reduction == "positions":
        divisor = jnp.float32(batch.tokens.size)
    else:
        weights = weights / jnp.maximum(weighted.sum(axis=2, keepdims=True), 1)
        divisor = jnp.float32(batch.tokens.shape[0])
    losses = soft_cross_entropy(
        by_teacher(outputs), drafter.lm_head.weight[...], features.hidden, rows, features.best, features.log_mass,
        weights, kind=settings.kind, block=settings.block,
    )  # fmt: skip
    return losses.total, (divisor, _counts(losses.loss, losses.hit, weighted, counts, feedback))


def _counts(loss: jax.Array, hit: jax.Array, weighted: jax.Array, eligible: jax.Array, feedback: jax.Array) -> Counts:
    # Back to slots, where a draft's steps stand in one column.
    by_slot = jnp.stack([jnp.roll(hit[:, k], -1 - k, axis=1) for k in range(hit.shape[1])], axis=1)
    prefix = jnp.cumprod(by_slot.astype(jnp.int32), axis=1)
    rows = jnp.float32(hit.shape[0])

    def total(array: jax.Array) -> jax.Array:
        return array.sum(axis=(0, 2), dtype=jnp.float32)

    return Counts(total(loss), total(weighted), total(eligible), total(hit), total(prefix), feedback * rows, rows)


def metrics(counts: Counts) -> dict[str, Any]:
    """Host-side figures of summed counts: loss, acceptance and feedback size by TTT step, simulated acceptance length.

    `acceptance[k]` is conditional on nothing (each step is fed the data); `simulated_acceptance_length` multiplies hits
    along each slot before it averages: 1 + sum over k of the share of slots that hit at every step up to k.
    """
    host = jax.device_get(counts)
    eligible = [max(float(n), 1.0) for n in host.eligible]
    prefix = [float(h) / n for h, n in zip(host.prefix_hits, eligible, strict=True)]
    return {
        "loss": [float(x) / max(float(n), 1.0) for x, n in zip(host.loss, host.weighted, strict=True)],
        "acceptance": [float(h) / n for h, n in zip(host.hits, eligible, strict=True)],
        "prefix_acceptance": prefix,
        "simulated_acceptance_length": 1.0 + sum(prefix),
        "feedback_rms": [float(x) / max(float(host.rows), 1.0) for x in host.feedback],
        "supervised": float(host.eligible[0]),
        "in_draft_vocab": float(host.weighted[0]) / eligible[0],
    }
