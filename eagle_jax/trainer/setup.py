"""From a recipe to what a run needs: the target, the first parameters, the step, and where all of it lives."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from eagle_jax.checkpoint.drafter_checkpoint import open_drafter
from eagle_jax.checkpoint.hub import resolve
from eagle_jax.checkpoint.layouts.base import DRAFT_TO_TARGET
from eagle_jax.checkpoint.layouts.vocabulary import check_ids
from eagle_jax.checkpoint.load import Target, build_drafter, load_target
from eagle_jax.checkpoint.place import with_parameters
from eagle_jax.config import DrafterConfig, check_pair
from eagle_jax.drafter.eagle3 import Eagle3Drafter
from eagle_jax.errors import ConfigError
from eagle_jax.sharding import Placement, check_divides, make_mesh
from eagle_jax.trainer.config import TrainConfig
from eagle_jax.trainer.optimizer import make_optimizer
from eagle_jax.trainer.step import Frozen, TrainState, TrainStep, frozen_placement, state_placement

HEAD = "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class Setup:
    """A run that can start.

    Attributes:
      config: the recipe; target: the loaded target; drafter: what is trained.
      step: one training step; frozen: its constants, placed.
      placement: the mesh, or None on one device.
      about: what must not change when the run is resumed.
    """

    config: TrainConfig
    target: Target
    drafter: DrafterConfig
    step: TrainStep
    frozen: Frozen
    placement: Placement | None
    about: dict[str, Any]
    _first: dict[str, jax.Array]

    def state(self) -> TrainState:
        """The state before the first step, placed."""

        def make(parameters: dict[str, jax.Array]) -> TrainState:
            return TrainState(jnp.int32(0), parameters, self.step.optimizer.init(parameters))

        # Copies, because a state is donated to its first step.
        first = jax.tree.map(jnp.copy, self._first)
        return jax.jit(make, out_shardings=self.shardings(jax.eval_shape(make, first)))(first)

    def shardings(self, state: TrainState) -> Any:
        """Where a state lives; None on one device."""
        if self.placement is None:
            return None
        return state_placement(state, self.placement, self.drafter.block.head_dim)

    def model(self, parameters: dict[str, jax.Array]) -> Eagle3Drafter:
        """The drafter with these parameters in the target's dtype, ready to decode."""
        abstract = nnx.eval_shape(lambda: Eagle3Drafter(self.drafter, dtype=jnp.float32, rngs=nnx.Rngs(0)))
        dtype = self.target.model.dtype
        model = with_parameters(
            abstract,
            {
                path: array if path == DRAFT_TO_TARGET else array.astype(dtype)
                for path, array in self.arrays(parameters).items()
            },
        )
        model.bind(self.target.model.embed, self.target.model.head)
        return model

    def arrays(self, parameters: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Every array of the drafter, trained or not, by canonical path."""
        return parameters | self.frozen.parameters


def prepare(config: TrainConfig, vocabulary: np.ndarray | None) -> Setup:
    """Loads the target and makes the drafter.

    Args:
      vocabulary: [U] ascending target ids of the draft vocabulary, or None for all of them. A drafter to start from
        brings its own, and this must be None or equal.

    Raises:
      EagleJaxError: as `load_target` and `open_drafter`, and for a recipe that does not fit them.
    """
    sizes = config.mesh
    placement = None
    if sizes.data * sizes.fsdp * sizes.tensor > 1:
        placement = Placement(make_mesh(sizes.data, sizes.tensor, sizes.fsdp))
    target = load_target(config.target, dtype=config.dtype, placement=placement)
    drafter, arrays = _drafter(config, target, vocabulary)
    check_pair(target.config, drafter)
    if placement is not None:
        check_divides(drafter.block, placement, "drafter")
    frozen_paths = {DRAFT_TO_TARGET} if config.drafter.train_head else {DRAFT_TO_TARGET, HEAD}
    first = {path: array for path, array in arrays.items() if path not in frozen_paths}
    kept = {path: array for path, array in arrays.items() if path in frozen_paths}

    graph, weights = nnx.split(target.model)
    table = kept.get(DRAFT_TO_TARGET)
    head = target.model.head.weight[...]
    frozen = Frozen(
        parameters=kept,
        embed=None if drafter.own_embedding else target.model.embed.weight[...],
        rows=head if table is None else head[table],
        target=weights,
    )
    if placement is not None:
        places = frozen_placement(frozen, placement, drafter.block.head_dim, target.config.block.head_dim)
        frozen = jax.device_put(frozen, places)
    step = TrainStep(drafter, config.loss, make_optimizer(config.optimizer), target.model.dtype, graph)
    ids = b"" if table is None else np.asarray(table).tobytes()
    about = {
        "target": dataclasses.asdict(target.config),
        "drafter": dataclasses.asdict(drafter),
        "vocabulary": hashlib.sha256(ids).hexdigest()[:16],
        "optimizer": dataclasses.asdict(config.optimizer),
        "train_head": config.drafter.train_head,
    }
    return Setup(config, target, drafter, step, frozen, placement, about, first)


def _drafter(
    config: TrainConfig, target: Target, vocabulary: np.ndarray | None
) -> tuple[DrafterConfig, dict[str, jax.Array]]:
    """Configuration, and every array in float32 (ids stay integers)."""
    section = config.drafter
    if section.start_from is not None:
        checkpoint = open_drafter(resolve(section.start_from))
        if not checkpoint.config.own_head:
            raise ConfigError(f"{checkpoint.where}: borrows the target's head, so there is none to train")
        arrays = _flat(build_drafter(checkpoint))
        held = arrays.get(DRAFT_TO_TARGET)
        if vocabulary is not None and (held is None or not np.array_equal(held, vocabulary)):
            raise ConfigError(
                f"{checkpoint.where}: has a draft vocabulary of its own, whose rows its head was trained for; leave "
                "drafter.vocabulary out, or start a new drafter"
            )
        return checkpoint.config, arrays
    size = target.config.vocab_size
    if vocabulary is not None:
        check_ids(vocabulary, size, str(section.vocabulary))
        size = len(vocabulary)
    drafter = section.build(target.config, size)
    seed = config.data.seed
    arrays = _flat(nnx.jit(lambda: Eagle3Drafter(drafter, dtype=jnp.float32, rngs=nnx.Rngs(seed)))())
    if vocabulary is not None and DRAFT_TO_TARGET in arrays:
        arrays[DRAFT_TO_TARGET] = jnp.asarray(vocabulary, jnp.int32)
    if section.head_init == "target":
        head = target.model.head.weight[...]
        table = arrays.get(DRAFT_TO_TARGET)
        arrays[HEAD] = (head if table is None else head[table]).astype(jnp.float32)
    return drafter, arrays


def _flat(model: Eagle3Drafter) -> dict[str, jax.Array]:
    return {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(model))}
