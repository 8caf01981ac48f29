"""Plain sampling: the target's distribution, seeds per row, and greedy at temperature 0."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from eagle_jax import autoregressive
from eagle_jax.data.sampling_loop import Sampler, choose
from eagle_jax.errors import InputError

PROMPTS = [[5, 6, 7], [9], [1, 2, 3, 4, 5, 6, 7, 8, 9]]  # one of a single token, one longer than a chunk


@pytest.fixture(scope="module")
def sampler():
    return Sampler(tiny.target(num_layers=1), prefill_chunk=8)


def draw(sampler, prompts=PROMPTS, seeds=(1, 2, 3), temperature=1.0, **options):
    options = {"max_new_tokens": 12, "eos_token_ids": ()} | options
    result = sampler.sample(prompts, temperature=temperature, seeds=seeds, **options)
    return [row.tokens for row in result.rows]


def test_draws_follow_the_distribution():
    logits = jnp.log(jnp.asarray([0.5, 0.25, 0.25, 0.0]))
    n = 20_000
    for temperature, expected in ((1.0, [0.5, 0.25, 0.25, 0]), (0.5, [2 / 3, 1 / 6, 1 / 6, 0])):
        tokens = jax.jit(choose)(jnp.arange(n, dtype=jnp.uint32), temperature, jnp.tile(logits, (n, 1)), jnp.full(n, 7))
        np.testing.assert_allclose(np.bincount(tokens, minlength=4) / n, expected, atol=0.015)  # 4 standard errors


def test_positions_and_seeds_draw_independently():
    logits = jnp.zeros((4, 1000))
    draws = choose(jnp.asarray([1, 1, 2, 2], jnp.uint32), jnp.float32(1), logits, jnp.asarray([3, 4, 3, 4]))
    assert len(set(draws.tolist())) == 4


def test_a_row_depends_on_its_seed_only(sampler):
    together = draw(sampler)
    assert draw(sampler, batch_size=1) == together
    other = draw(sampler, seeds=(1, 2, 4))
    assert other[:2] == together[:2] and other[2] != together[2]


def test_temperature_zero_and_near_zero_are_greedy(sampler):
    greedy = [row.tokens for row in sampler.generate(PROMPTS, max_new_tokens=12, eos_token_ids=()).rows]
    assert draw(sampler, temperature=0) == draw(sampler, temperature=1e-4) == greedy


def test_first_tokens_are_drawn_too(sampler):
    rows = [row for seed in range(8) for row in draw(sampler, seeds=(seed, 50 + seed, 100 + seed), temperature=3.0)]
    assert len({row[0] for row in rows[::3]}) > 3


def test_end_tokens_end_a_row(sampler):
    free = draw(sampler)
    end = free[0][4]
    cut = draw(sampler, eos_token_ids=[end])
    assert cut[0] == free[0][: free[0].index(end) + 1]


def test_bad_temperatures(sampler):
    for temperature in (-0.1, float("nan"), float("inf")):
        with pytest.raises(InputError, match="temperature must be a finite number"):
            draw(sampler, temperature=temperature)


def test_ties_go_to_the_lowest_id():
    assert autoregressive.greedy(jnp.asarray([[0.0, 2.0, 2.0]]), jnp.zeros(1)).tolist() == [1]
