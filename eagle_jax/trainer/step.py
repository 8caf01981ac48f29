"""One training step: gradients of a global batch, accumulated over microbatches, and the update.

Masters are float32 and computing may be bfloat16; only what is trained has a gradient or an optimiser state. The target
either runs inside the step (online) or left its features beforehand (offline).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from eagle_jax.checkpoint.layouts.base import DRAFT_TO_TARGET
from eagle_jax.checkpoint.place import with_parameters
from eagle_jax.config import DrafterConfig
from eagle_jax.drafter.eagle3 import Eagle3Drafter
from eagle_jax.layers.linear import VocabTable
from eagle_jax.records import record
from eagle_jax.sharding import Placement
from eagle_jax.trainer.batch import Batch, Features
from eagle_jax.trainer.capture import capture, draft_ids
from eagle_jax.trainer.losses import Counts, LossSettings, total_loss


@record
class TrainState:
    """What changes from step to step.

    step: [] steps taken; parameters: canonical path -> float32 array; optimizer: optax's state.
    """

    step: jax.Array
    parameters: dict[str, jax.Array]
    optimizer: Any


@record
class Frozen:
    """What a step reads and never changes.

    parameters: canonical path -> drafter arrays that are not trained (the vocabulary table, a frozen head).
    embed: [V, H] the target's embedding, where the drafter has none of its own.
    rows: [U, D] rows of the target's head for the draft vocabulary.
    target: the target's parameters (online), or None.
    """

    parameters: dict[str, jax.Array]
    embed: jax.Array | None
    rows: jax.Array
    target: Any


@record
class StepReport:
    """What a step says about itself; read late, so that nothing waits for the device.

    counts: see `Counts`; loss: [] the minimised number; gradient_norm: [] before clipping.
    finite: [] bool; where false the update was not made.
    """

    counts: Counts
    loss: jax.Array
    gradient_norm: jax.Array
    finite: jax.Array


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """The step as a function of arrays; `jax.jit(step)` with the state donated is the whole program.

    Attributes:
      config: the drafter; it has its own head.
      loss: what is minimised.
      optimizer: what updates.
      compute_dtype: of activations and of the parameters' copies.
      target_graph: the target's structure (online), or None.
    """

    config: DrafterConfig
    loss: LossSettings
    optimizer: optax.GradientTransformation
    compute_dtype: Any
    target_graph: nnx.GraphDef | None

    def __call__(
        self, state: TrainState, frozen: Frozen, batches: Batch, features: Features | None
    ) -> tuple[TrainState, StepReport]:
        """Takes N microbatches of B rows: every array has leading axes [N, B]."""

        def micro(carry, inputs):
            gradients, total, divisor, counts = carry
            (sum_, (divisor_, counts_)), gradients_ = jax.value_and_grad(self._loss, has_aux=True)(
                state.parameters, frozen, *inputs
            )
            added = jax.tree.map(jnp.add, (gradients, counts), (gradients_, counts_))
            return (added[0], total + sum_, divisor + divisor_, added[1]), None

        first = jax.tree.map(lambda array: array[0], (batches, features))
        counts = jax.eval_shape(lambda *a: self._loss(*a)[1][1], state.parameters, frozen, *first)
        start = jax.tree.map(
            lambda a: jnp.zeros(a.shape, a.dtype), (state.parameters, jnp.zeros(()), jnp.zeros(()), counts)
        )
        (gradients, total, divisor, counts), _ = jax.lax.scan(micro, start, (batches, features))
        divisor = jnp.maximum(divisor, 1e-9)
        gradients = jax.tree.map(lambda g: g / divisor, gradients)
        loss, norm = total / divisor, optax.tree.norm(gradients)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)

        updates, optimizer = self.optimizer.update(gradients, state.optimizer, state.parameters)
        updated = TrainState(state.step + 1, optax.apply_updates(state.parameters, updates), optimizer)
        kept = jax.tree.map(lambda new, old: jnp.where(finite, new, old), updated, state)
        return kept, StepReport(counts, loss, norm, finite)

    def evaluate(
        self, parameters: dict[str, jax.Array], frozen: Frozen, batch: Batch, features: Features | None
    ) -> Counts:
        """The counts of one batch, without gradients."""
        return self._loss(parameters, frozen, batch, features)[1][1]

    def _loss(self, parameters: dict[str, jax.Array], frozen: Frozen, batch: Batch, features: Features | None):
        drafter = self._drafter(parameters, frozen)
        if self.target_graph is not None:
            target = nnx.merge(self.target_graph, frozen.target)
            table = frozen.parameters.get(DRAFT_TO_TARGET)
            assert self.config.capture_layers is not None
            features = capture(target, batch, self.config.capture_layers, draft_ids(table, self.config.vocab_size))
        assert features is not None, "offline training needs stored features"
        return total_loss(drafter, frozen.rows, batch, features, self.loss)

    def _drafter(self, parameters: Mapping[str, jax.Array], frozen: Frozen) -> Eagle3Drafter:
        abstract = nnx.eval_shape(lambda: Eagle3Drafter(self.config, dtype=self.compute_dtype, rngs=nnx.Rngs(0)))
        values = {path: array.astype(self.compute_dtype) for path, array in parameters.items()}
        values |= {
            path: array if path == DRAFT_TO_TARGET else array.astype(self.compute_dtype)
            for path, array in frozen.parameters.items()
        }
        drafter = with_parameters(abstract, values)
        if frozen.embed is not None:
            drafter.embed = nnx.data(VocabTable.holding(frozen.embed))
        return drafter


def state_placement(state: TrainState, placement: Placement, head_dim: int) -> TrainState:
    """Shardings of a state: parameters by the table, moments as their parameters, the rest on every device."""
    everywhere = NamedSharding(placement.mesh, PartitionSpec())

    def sharding(path: tuple, leaf: jax.Array) -> NamedSharding:
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        parameter = state.parameters.get(names[-1]) if names else None
        if parameter is None or parameter.shape != leaf.shape:
            return everywhere
        return placement.parameter(names[-1], leaf.shape, head_dim)

    return jax.tree_util.tree_map_with_path(sharding, state)


def frozen_placement(frozen: Frozen, placement: Placement, head_dim: int, target_head_dim: int) -> Frozen:
    """Shardings of what is frozen, the target's parameters by the same table."""

    def by_path(path: str, array: jax.Array) -> NamedSharding:
        return placement.parameter(path, array.shape, head_dim)

    target = frozen.target
    if target is not None:
        flat = [
            (path, leaf.replace(placement.parameter(".".join(map(str, path)), leaf.shape, target_head_dim)))
            for path, leaf in nnx.to_flat_state(target)
        ]
        target = nnx.from_flat_state(flat)
    shardings: dict[str, Any] = {
        "parameters": {path: by_path(path, array) for path, array in frozen.parameters.items()},
        "embed": None if frozen.embed is None else by_path("embed.weight", frozen.embed),
        "rows": by_path("lm_head.weight", frozen.rows),
        "target": target,
    }
    return Frozen(**shardings)
