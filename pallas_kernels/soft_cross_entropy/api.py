"""The public function of the op: checks shapes, then runs the blockwise reference (XLA compiles it everywhere)."""

from __future__ import annotations

import typing

import jax

from pallas_kernels.soft_cross_entropy.reference import LOSSES, reference


class Losses(typing.NamedTuple):
    """What came out of a batch.

    total: scalar, the weighted sum of the losses; the only differentiable output.
    loss: [B, K, P] loss of each prediction, 0 where its weight is 0.
    hit: [B, K, P] bool, the student's best token is the teacher's best; false where the weight is 0.
    """

    total: jax.Array
    loss: jax.Array
    hit: jax.Array


def soft_cross_entropy(
    student: jax.Array,
    head: jax.Array,
    teacher: jax.Array,
    rows: jax.Array,
    best: jax.Array,
    log_mass: jax.Array,
    weights: jax.Array,
    *,
    kind: str = "kl",
    block: int = 128,
) -> Losses:
    """Compares K student predictions per position with one teacher distribution over U draft tokens.

    Student and teacher logits are products with their heads, made block by block; gradients are made in the same pass,
    so that neither pass holds more than one block of logits and nothing is computed twice. Positions without any weight
    cost next to nothing.

    Args:
      student: [B, K, P, H] states that the student's head reads.
      head: [U, H] the student's head.
      teacher: [B, P, D] states that the teacher's head reads.
      rows: [U, D] rows of the teacher's head for the draft vocabulary.
      best: [B, P] draft id of the teacher's most likely token of all V, or -1 when the draft vocabulary lacks it.
      log_mass: [B, P] log-sum-exp of the teacher's logits over all V; used by "lk-alpha" and "lk-lambda" only, which
        compare with the true probabilities, where "kl" renormalises them over the U.
      weights: [B, K, P] float32, 0 for predictions that do not count.
      kind: "kl" forward KL from the renormalised teacher; "ce" cross-entropy with the teacher's best token; "lk-alpha"
        minus the log of the acceptance sum(min(p, q)); "lk-lambda" KL and total variation mixed, moving to the latter
        as the acceptance grows.
      block: positions per block.

    Raises:
      ValueError: shapes that do not fit together, or an unknown kind.
    """
    B, K, P, H = student.shape
    U, D = rows.shape
    expected = {
        "head": (head, (U, H)),
        "teacher": (teacher, (B, P, D)),
        "best": (best, (B, P)),
        "log_mass": (log_mass, (B, P)),
        "weights": (weights, (B, K, P)),
    }
    for name, (array, shape) in expected.items():
        if array.shape != shape:
            raise ValueError(f"soft_cross_entropy: {name} is {array.shape}, expected {shape}")
    if kind not in LOSSES:
        raise ValueError(f"soft_cross_entropy: unknown loss {kind!r} ({', '.join(LOSSES)})")
    if block < 1:
        raise ValueError(f"soft_cross_entropy: block must be at least 1, found {block}")
    return Losses(*reference(student, head, teacher, rows, best, log_mass, weights, kind, min(block, P)))
