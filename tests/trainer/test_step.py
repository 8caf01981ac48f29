"""The step: it learns, it adds up, it leaves alone what is not trained, and a batch that breaks changes nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from flax import nnx
from training import ADAMW, LOSS, NEW_TOKENS, make, packed, split

from eagle_jax.checkpoint.place import with_parameters
from eagle_jax.drafter.eagle3 import Eagle3Drafter
from eagle_jax.generation import Generator
from eagle_jax.trainer.capture import capture, draft_ids, teacher_statistics
from eagle_jax.trainer.losses import metrics
from eagle_jax.trainer.optimizer import learning_rate, make_optimizer


@pytest.fixture(scope="module")
def target():
    """Its best token leads clearly everywhere, so that what is learnt is also what is chosen."""
    model = tiny.target()
    model.embed.weight.set_value(4 * model.embed.weight[...])
    return model


@pytest.fixture(scope="module")
def chats(target):
    """Four prompts with the target's own answers: (prompt, answer) pairs of token lists."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, tiny.VOCAB, n).tolist() for n in (5, 9, 3, 12)]
    answers = Generator(target).generate(prompts, max_new_tokens=NEW_TOKENS, eos_token_ids=())
    return [(prompt, row.tokens) for prompt, row in zip(prompts, answers.rows, strict=True)]


def test_four_chats_are_learnt_and_then_accepted_by_the_decode_loop(target, chats):
    """The real loop accepts nearly everything, and as much as training said (B92)."""
    loss = dataclasses.replace(LOSS, steps=4)
    step, state, frozen = make(target, loss=loss, block={"mlp_size": 128})  # room to learn them by heart
    batches = split(packed(chats), 1)
    run = jax.jit(step, donate_argnums=0)
    for _ in range(300):
        state, report = run(state, frozen, batches, None)
    figures = metrics(report.counts)
    assert min(figures["acceptance"]) > 0.95
    abstract = nnx.eval_shape(lambda: Eagle3Drafter(step.config, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    drafter = with_parameters(abstract, state.parameters | frozen.parameters)
    generator = Generator(target, drafter, num_draft_tokens=loss.steps)
    result = generator.generate([prompt for prompt, _ in chats], max_new_tokens=NEW_TOKENS, eos_token_ids=())
    assert [row.tokens for row in result.rows] == [answer for _, answer in chats]
    assert abs(result.mean_acceptance_length / figures["simulated_acceptance_length"] - 1) < 0.05


def test_microbatches_add_up_to_the_whole_batch(target, chats):
    """One divisor for all of them (B88), although their supervised tokens differ."""
    batch = packed([(p, a[: 10 * i + 10]) for i, (p, a) in enumerate(chats)])
    step, state, frozen = make(target, draft_vocab_size=24)
    results = [jax.jit(step)(state, frozen, split(batch, micro), None) for micro in (1, 2)]
    for a, b in zip(*(jax.tree.leaves(result) for result in results), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def test_offline_features_give_the_online_step(target, chats):
    batch = packed(chats)
    online, state, frozen = make(target, draft_vocab_size=24)
    offline, _, stored = make(target, online=False, draft_vocab_size=24)
    table = draft_ids(frozen.parameters["draft_to_target"], target.config.vocab_size)
    features = nnx.jit(lambda m: capture(m, batch, online.config.capture_layers, table))(target)
    a = jax.jit(online)(state, frozen, split(batch, 1), None)
    b = jax.jit(offline)(state, stored, split(batch, 1), jax.tree.map(lambda x: x[None], features))
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)


def test_a_batch_that_is_not_finite_changes_nothing(target, chats):
    step, state, frozen = make(target)
    broken = dataclasses.replace(frozen, embed=frozen.embed.at[chats[0][1][3]].set(jnp.nan))
    after, report = jax.jit(step)(state, broken, split(packed(chats), 1), None)
    assert not report.finite
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True))


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_only_what_is_trained_has_a_state_and_moves(target, chats, kind):
    """B95: no moments of the target, of the embedding, of a frozen head."""
    step, state, frozen = make(target, dataclasses.replace(ADAMW, kind=kind), frozen_head=True, draft_vocab_size=24)
    size = sum(p.size for p in state.parameters.values())
    moments = sum(leaf.size for leaf in jax.tree.leaves(state.optimizer) if getattr(leaf, "ndim", 0))
    assert moments == (2 * size if kind == "adamw" else moments) and moments <= 2 * size
    after, _ = jax.jit(step)(state, frozen, split(packed(chats), 1), None)
    assert "lm_head.weight" not in after.parameters
    for path, parameter in after.parameters.items():
        assert not np.array_equal(parameter, state.parameters[path]), path


def test_norms_move_with_float32_masters_and_bfloat16_compute(target, chats):
    """B93: in bfloat16 a step of 1e-4 at 1.0 rounds away."""
    settings = dataclasses.replace(ADAMW, learning_rate=1e-4, schedule="constant", warmup_steps=0)
    step, state, frozen = make(target, settings, dtype=jnp.bfloat16)
    run = jax.jit(step)
    for _ in range(3):
        state, _ = run(state, frozen, split(packed(chats), 1), None)
    for path, parameter in state.parameters.items():
        assert parameter.dtype == jnp.float32
        if path.endswith(".scale"):
            assert np.abs(parameter - 1).max() > 1e-4, path


def test_teacher_statistics_equal_the_whole_logits(target):
    hidden = jnp.asarray(np.random.default_rng(0).standard_normal((2, 5, 32)), jnp.float32)
    table = target.head.weight[...]
    logits = hidden @ table.T
    for block in (7, 16, 61, 100):
        best, log_mass = teacher_statistics(table, hidden, block)
        assert np.array_equal(best, logits.argmax(-1))
        np.testing.assert_allclose(log_mass, jax.nn.logsumexp(logits, axis=-1), rtol=1e-5)
    tied = teacher_statistics(jnp.zeros((10, 32)), hidden, 4)[0]
    assert not tied.any()


def test_schedules_follow_the_step_count():
    rate = learning_rate(ADAMW, 1.0)
    assert float(rate(0)) == pytest.approx(0.1) and float(rate(9)) == pytest.approx(1.0)
    assert float(rate(300)) == pytest.approx(0.05) and float(rate(500)) == pytest.approx(0.05)
    assert float(learning_rate(dataclasses.replace(ADAMW, warmup_steps=0), 1.0)(0)) == pytest.approx(1.0)
    constant = dataclasses.replace(ADAMW, schedule="constant")
    assert float(learning_rate(constant, 1.0)(10_000)) == 1.0


def test_clipping_bounds_the_gradient():
    settings = dataclasses.replace(ADAMW, clip=0.5)
    transform = make_optimizer(settings)
    gradients = {"a.kernel": jnp.full((2, 2), 100.0)}
    clipped, _ = optax.clip_by_global_norm(0.5).update(gradients, optax.EmptyState())
    ours, _ = transform.update(gradients, transform.init(gradients), gradients)
    theirs, _ = make_optimizer(dataclasses.replace(settings, clip=1e9)).update(
        clipped, make_optimizer(settings).init(gradients), gradients
    )
    np.testing.assert_allclose(ours["a.kernel"], theirs["a.kernel"], rtol=1e-6)
