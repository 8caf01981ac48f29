"""The step on meshes of 8 forced CPU devices: the one-device losses, and memory that shrinks with `fsdp`."""

import jax
import numpy as np
import pytest
import tiny
from jax.sharding import NamedSharding, PartitionSpec
from training import NEW_TOKENS, make, packed, split

from eagle_jax import sharding
from eagle_jax.generation import Generator
from eagle_jax.trainer.losses import metrics
from eagle_jax.trainer.step import frozen_placement, state_placement


@pytest.fixture(scope="module")
def target():
    return tiny.target()


@pytest.fixture(scope="module")
def batches(target):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, tiny.VOCAB, n).tolist() for n in (5, 9, 3, 12)]
    rows = Generator(target).generate(prompts, max_new_tokens=NEW_TOKENS, eos_token_ids=()).rows
    batch = packed([(prompt, row.tokens) for prompt, row in zip(prompts, rows, strict=True)])
    return split(jax.tree.map(lambda a: np.concatenate([a, a, a, a]), batch), 1)  # 8 rows


def losses(step, state, frozen, batches, mesh=None):
    """Two steps; returns what they report, and the final state."""
    run = jax.jit(step, donate_argnums=0)
    if mesh is not None:
        placement = sharding.Placement(mesh)
        head_dim = step.config.block.head_dim
        shardings = state_placement(state, placement, head_dim)
        state = jax.device_put(state, shardings)
        frozen = jax.device_put(frozen, frozen_placement(frozen, placement, head_dim, head_dim))
        batches = jax.device_put(batches, NamedSharding(mesh, PartitionSpec(None, *sharding.ROWS)))
        run = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
    found = []
    for _ in range(2):
        state, report = run(state, frozen, batches, None)
        found.append(metrics(report.counts) | {"total": float(report.loss), "norm": float(report.gradient_norm)})
    return found, state


@pytest.fixture(scope="module")
def on_one_device(target, batches):
    return losses(*make(target, draft_vocab_size=24), batches)


@pytest.mark.parametrize("data, fsdp, tensor", [(2, 2, 2), (1, 8, 1)])
def test_every_mesh_gives_the_losses_of_one_device(target, batches, on_one_device, data, fsdp, tensor):
    mesh = sharding.make_mesh(data, tensor, fsdp)
    found, state = losses(*make(target, draft_vocab_size=24), batches, mesh)
    for ours, theirs in zip(found, on_one_device[0], strict=True):
        for name in theirs:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=2e-4, atol=1e-6, err_msg=name)
    held, whole = (
        sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves((s.parameters, s.optimizer)))
        for s in (state, on_one_device[1])
    )
    assert held < 1.15 * whole / fsdp  # only norms stay whole
    assert tensor == 1 or held < 0.75 * whole / fsdp  # fc, a third of this small drafter, is not split over `tensor`
