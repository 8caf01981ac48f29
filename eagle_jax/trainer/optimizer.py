"""The optimiser: optax's AdamW or Muon, a schedule by step, clipping. Parameters are flat: canonical path -> array."""

from __future__ import annotations

from typing import Literal

import jax
import optax
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class OptimizerSettings:
    """What updates the parameters.

    Attributes:
      total_steps: steps of the run and of the schedule, which the step count drives: a resumed run continues it.
      kind: "adamw" for every parameter, or "muon" for the blocks' and fc's matrices and AdamW for the rest.
      learning_rate: the schedule's peak; muon_learning_rate: that of the matrices under Muon.
      schedule: after the warm-up "cosine" or "linear" fall to `final_share` of the peak at `total_steps`; "constant"
        stays.
      warmup_steps: linear from 0.
      b1, b2: of Adam; weight_decay: of matrices only.
      clip: largest global norm of a gradient.
    """

    total_steps: int = Field(ge=1)
    kind: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = Field(default=1e-4, gt=0)
    muon_learning_rate: float = Field(default=1e-3, gt=0)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    final_share: float = Field(default=0.1, ge=0, le=1)
    warmup_steps: int = Field(default=0, ge=0)
    b1: float = Field(default=0.9, ge=0, lt=1)
    b2: float = Field(default=0.95, ge=0, lt=1)
    weight_decay: float = Field(default=0.0, ge=0)
    clip: float = Field(default=0.5, gt=0)


def learning_rate(settings: OptimizerSettings, peak: float) -> optax.Schedule:
    """Step -> learning rate."""
    rest = max(settings.total_steps - settings.warmup_steps, 1)
    if settings.schedule == "cosine":
        main = optax.cosine_decay_schedule(peak, rest, alpha=settings.final_share)
    elif settings.schedule == "linear":
        main = optax.linear_schedule(peak, peak * settings.final_share, rest)
    else:
        main = optax.constant_schedule(peak)
    # The first step already moves: step 0 of a warm-up over n steps has 1/n of the peak.
    warmup = optax.linear_schedule(peak / max(settings.warmup_steps, 1), peak, max(settings.warmup_steps - 1, 1))
    return optax.join_schedules([warmup, main], [settings.warmup_steps])


def make_optimizer(settings: OptimizerSettings) -> optax.GradientTransformation:
    """The whole update, for a flat dict of parameters."""

    def is_matrix(parameters: dict[str, jax.Array]) -> dict[str, bool]:
        return {path: path.endswith(".kernel") for path in parameters}

    def labels(parameters: dict[str, jax.Array]) -> dict[str, str]:
        return {path: "muon" if matrix else "adamw" for path, matrix in is_matrix(parameters).items()}

    adamw = optax.adamw(
        learning_rate(settings, settings.learning_rate),
        b1=settings.b1,
        b2=settings.b2,
        weight_decay=settings.weight_decay,
        mask=is_matrix,
    )
    update = adamw
    if settings.kind == "muon":
        muon = optax.contrib.muon(
            learning_rate(settings, settings.muon_learning_rate), weight_decay=settings.weight_decay
        )
        update = optax.partition({"muon": muon, "adamw": adamw}, labels)
    return optax.chain(optax.clip_by_global_norm(settings.clip), update)
