"""Which predictions count, and the whole loss with its gradients against `speculators` (scripts/make_golden.py)."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from eagle_jax.checkpoint.drafter_checkpoint import open_drafter
from eagle_jax.checkpoint.load import build_drafter
from eagle_jax.layers.norm import rms_normalize
from eagle_jax.trainer.batch import Batch, Features, supervised
from eagle_jax.trainer.capture import teacher_statistics
from eagle_jax.trainer.losses import LossSettings, metrics, total_loss

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = sorted(path.parent.name for path in GOLDEN.glob("*/training.npz"))
SPECULATORS = LossSettings(
    steps=4, kind="kl", step_decay=1.0, reduction="sequences", alignment="teacher", only_draft_vocab=False,
    remat=False, block=8,
)  # fmt: skip


def row(tokens=None, mask=None, documents=None) -> Batch:
    """One row; what is not given is all one document, all answer."""
    T = len(next(a for a in (mask, documents, tokens) if a is not None))
    arrays = (tokens or range(T), mask or [1] * T, documents or [1] * T, range(T))
    tokens, mask, documents, positions = (jnp.asarray([list(a)]) for a in arrays)
    return Batch(tokens, mask.astype(bool), documents, positions)


def by_slot(counted: jax.Array, k: int) -> list[int]:
    """Step k's row of `supervised`, moved from the teacher's position to the slot."""
    return np.roll(np.asarray(counted)[0, k], -1 - k).astype(int).tolist()


def test_the_mask_moves_with_the_tokens():
    """B81: the slot's own token is token t + 1; the default supervises by the predicted token, one further."""
    batch = row(mask=[0, 0, 0, 1, 1, 1, 1, 0])
    assert by_slot(supervised(batch, 1, "teacher"), 0) == [0, 0, 1, 1, 1, 1, 0, 0]
    assert by_slot(supervised(batch, 1), 0) == [0, 1, 1, 1, 1, 0, 0, 0]
    assert by_slot(supervised(batch, 1, "safeailab"), 0) == [0, 0, 0, 1, 1, 1, 1, 0]


def test_later_steps_lose_the_last_slots():
    """B82: step k is k + 1 tokens ahead, so the last slots have no teacher; the default needs one token more."""
    batch = row(mask=[1] * 5)
    assert np.asarray(supervised(batch, 3, "safeailab")).sum(axis=2).tolist() == [[4, 3, 2]]
    assert np.asarray(supervised(batch, 3)).sum(axis=2).tolist() == [[3, 2, 1]]


def test_documents_and_padding_do_not_count():
    batch = row(documents=[1, 1, 1, 1, 2, 2, 2, 0, 0])
    first, second = supervised(batch, 2)[0]
    assert first.astype(int).tolist() == [0, 1, 1, 0, 0, 1, 0, 0, 0]
    assert second.astype(int).tolist() == [0, 0, 1, 0, 0, 0, 0, 0, 0]


def shifted(golden: dict) -> tuple[Batch, Features, jax.Array]:
    """The recorded batch in our frame: there slot t holds token t + 1, and the teacher's state of t + 1 beside it."""
    T = len(golden["tokens"])
    numbers = golden["documents"] + 1
    starts = {int(d): int(np.argmax(numbers == d)) for d in np.unique(numbers)}

    def moved(array: np.ndarray) -> np.ndarray:  # one slot later, within a row with one more slot
        return np.concatenate([np.zeros_like(array[:1]), array])

    documents = np.concatenate([numbers, numbers[-1:]])
    positions = np.array([t - starts[int(d)] for t, d in enumerate(documents)])
    batch = Batch(
        *(jnp.asarray(a)[None] for a in (moved(golden["tokens"]), moved(golden["mask"]), documents, positions))
    )
    aux = np.concatenate([golden["aux"], np.zeros_like(golden["aux"][:1])])
    hidden = rms_normalize(jnp.asarray(moved(golden["hidden"]))[None], jnp.asarray(golden["norm"]), 1e-5)
    best, log_mass = teacher_statistics(jnp.asarray(golden["head"]), hidden)
    assert aux.shape[0] == T + 1
    return batch, Features(jnp.asarray(aux)[None], hidden, best, log_mass), jnp.asarray(golden["head"])


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_equal_speculators(case):
    golden = dict(np.load(GOLDEN / case / "training.npz"))
    checkpoint = open_drafter(GOLDEN / case)
    drafter = build_drafter(checkpoint)
    batch, features, rows = shifted(golden)
    graph, parameters, rest = nnx.split(drafter, nnx.Param, ...)

    def loss(parameters):
        total, (divisor, _) = total_loss(nnx.merge(graph, parameters, rest), rows, batch, features, SPECULATORS)
        return total / divisor

    value, gradients = jax.jit(jax.value_and_grad(loss))(parameters)
    # Their row's mean divides by the number of the step's counted slots, as ours does.
    np.testing.assert_allclose(value, golden["loss"], rtol=2e-5)
    found = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(gradients)}
    compared = 0
    for path, leaf in found.items():
        stored = [f"grad:{name}" for name in checkpoint.stored_names(path)]
        if stored[0] not in golden:
            assert path in ("lm_head.weight", "embed.weight")  # frozen there
            continue
        wanted = np.stack([golden[name] for name in stored]) if path == "fc_norm.scale" else golden[stored[0]]
        wanted = wanted.T if path.endswith(".kernel") else wanted
        np.testing.assert_allclose(leaf[...], wanted, atol=2e-5 * np.abs(wanted).max(), err_msg=path)
        compared += len(stored)
    assert compared == sum(name.startswith("grad:") for name in golden)


def tiny_loss(weights_of: str, mask: list[int], **changes) -> float:
    settings = dataclasses.replace(SPECULATORS, steps=1, reduction=weights_of, **changes)
    golden = dict(np.load(GOLDEN / "eagle3" / "training.npz"))
    golden["mask"] = np.asarray(mask, bool)
    golden["documents"] = np.zeros_like(golden["documents"])
    batch, features, rows = shifted(golden)
    drafter = build_drafter(open_drafter(GOLDEN / "eagle3"))
    total, (divisor, counts) = nnx.jit(lambda m: total_loss(m, rows, batch, features, settings))(drafter)
    return float(total / divisor), metrics(counts)


def test_reductions():
    """B88: the mean over what counts, not over all; the sum of losses is one and the same."""
    mask = [0, 1, 1, 0] + [0] * 20
    supervised_mean, figures = tiny_loss("supervised", mask)
    positions_mean, _ = tiny_loss("positions", mask)
    sequence_mean, _ = tiny_loss("sequences", mask)
    assert figures["supervised"] == 2
    np.testing.assert_allclose(positions_mean * 25, supervised_mean * 2, rtol=1e-5)
    np.testing.assert_allclose(sequence_mean, supervised_mean, rtol=1e-5)
    np.testing.assert_allclose(figures["loss"][0], supervised_mean, rtol=1e-5)


def test_positions_outside_the_draft_vocabulary():
    """B18: they weigh nothing in the loss, and count as misses."""
    golden = dict(np.load(GOLDEN / "eagle3" / "training.npz"))
    golden["mask"][:] = True
    golden["documents"][:] = 0
    batch, features, rows = shifted(golden)
    outside = jnp.arange(batch.tokens.shape[1]) % 3 == 0
    features = dataclasses.replace(features, best=jnp.where(outside[None], -1, features.best))
    settings = dataclasses.replace(SPECULATORS, reduction="supervised", only_draft_vocab=True)
    drafter = build_drafter(open_drafter(GOLDEN / "eagle3"))
    _, (divisor, counts) = nnx.jit(lambda m: total_loss(m, rows, batch, features, settings))(drafter)
    eligible = supervised(batch, 4, "teacher")
    assert counts.eligible.tolist() == eligible.sum(axis=(0, 2)).tolist()
    assert counts.weighted.tolist() == (eligible & ~outside[None, None]).sum(axis=(0, 2)).tolist()
    assert float(divisor) == counts.weighted.sum()


def test_prefix_hits_multiply_along_a_slot():
    """B92's simulated acceptance length: joint hits, not a product of means."""
    from eagle_jax.trainer.losses import _counts

    hits_by_slot = np.array([[1, 1, 0, 1], [1, 0, 1, 1]], bool)  # [K, slots]
    hit = np.zeros((1, 2, 8), bool)
    for k in range(2):
        hit[0, k, 1 + k : 5 + k] = hits_by_slot[k]
    eligible = np.zeros((1, 2, 8), bool)
    eligible[0, 0, 1:5] = eligible[0, 1, 2:6] = True
    zeros = jnp.zeros((1, 2, 8))
    figures = metrics(_counts(zeros, jnp.asarray(hit), jnp.asarray(eligible), jnp.asarray(eligible), jnp.zeros(2)))
    assert figures["acceptance"] == [0.75, 0.75]
    assert figures["prefix_acceptance"] == [0.75, 0.5]
    assert figures["simulated_acceptance_length"] == 2.25
