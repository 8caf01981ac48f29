"""The draft loop: what it pairs, what it keeps in its cache, and that a jitted round equals eager steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from eagle_jax import speculative
from eagle_jax.generation import Generator
from eagle_jax.layers import cache as kv_cache
from eagle_jax.prefill import Prompts, confirmed_by_prefill, prefill
from eagle_jax.proposal.chain import extend, propose
from eagle_jax.records import Confirmed

SLOTS = 40


@pytest.fixture(scope="module")
def pair():
    target = tiny.target()
    return target, tiny.drafter(target, num_layers=2, draft_vocab_size=24, own_head=True)


def caches(target, drafter, rows: int = 1):
    def new(layers, block):
        return kv_cache.init(layers, rows, block.num_kv_heads, SLOTS, block.head_dim, jnp.float32)

    return new(target.config.num_layers, target.config.block), new(drafter.config.num_layers, drafter.config.block)


def run_prefill(target, drafter, prompts: list[list[int]], chunk: int):
    width = -(-max(map(len, prompts)) // chunk) * chunk
    tokens = np.zeros((len(prompts), width + 1), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    padded = Prompts(jnp.array(tokens), jnp.array([len(prompt) for prompt in prompts]))
    return prefill(target, drafter, padded, *caches(target, drafter, len(prompts)), chunk)


def drafter_cache_from_scratch(target, drafter, text: list[int]):
    """All slots of a text in one pass: slot t pairs the state at t with token t + 1. Covers len(text) - 1 slots."""
    cache, draft_cache = caches(target, drafter)
    positions = jnp.arange(len(text) - 1)[None]
    none = jnp.zeros((1,), jnp.int32)
    out = target(jnp.array([text[:-1]]), positions, cache, none, capture=drafter.config.capture_layers)
    embeddings = drafter.embed_tokens(jnp.array([text[1:]]))
    drafted = drafter.step(embeddings, drafter.fuse(out.aux), positions, draft_cache, none)
    return drafted.kv


def test_prefill_pairs_states_with_the_next_token(pair):
    """Prompt [5, 6, 7], first new token n: the drafter reads [6, 7, n] beside the states at 5, 6, 7."""
    target, drafter = pair
    first, _, draft_cache, aux = run_prefill(target, drafter, [[5, 6, 7]], 4)
    confirmed = confirmed_by_prefill(first, aux, 3)
    *_, draft_cache = extend(drafter, confirmed, draft_cache, jnp.array([3]))
    wanted = drafter_cache_from_scratch(target, drafter, [5, 6, 7, int(first[0])])
    np.testing.assert_allclose(draft_cache.k[:, :, :, :3], wanted.k, atol=1e-5)
    np.testing.assert_allclose(draft_cache.v[:, :, :, :3], wanted.v, atol=1e-5)
    assert not draft_cache.k[:, :, :, 3:].any()


@pytest.mark.parametrize("chunk", [1, 3, 4, 7])
def test_chunked_prefill_leaves_the_same_caches(pair, chunk):
    target, drafter = pair
    prompts = [[5, 9, 8, 7, 30, 31, 4], [6, 11]]
    whole, chunked = (run_prefill(target, drafter, prompts, size) for size in (8, chunk))
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(chunked), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_after_a_round_the_cache_is_that_of_a_fresh_pass(pair, accepted):
    """Entries of accepted tokens come from the target's states, also after a round that accepted everything."""
    target, drafter = pair
    text = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    length = 3
    _, _, draft_cache, aux = run_prefill(target, drafter, [text[:length]], 4)
    confirmed = confirmed_by_prefill(jnp.array([text[length]]), aux, 4)
    # The round drafts (and leaves guesses in the cache), then the target confirms `accepted` tokens of `text`.
    _, draft_cache = propose(drafter, confirmed, draft_cache, jnp.array([length]), jnp.array([text[length]]), 3)
    cache, _ = caches(target, drafter)
    out = target(jnp.array([text]), jnp.arange(len(text))[None], cache, jnp.zeros(1, jnp.int32), capture=(2, 3, 5))
    kept = accepted + 1
    states = jnp.zeros((1, 4, 3, 32)).at[:, :kept].set(out.aux[:, length : length + kept])
    followers = jnp.zeros((1, 4), jnp.int32).at[:, :kept].set(jnp.array([text[length + 1 :][:kept]]))
    confirmed = Confirmed(followers, states, jnp.array([kept]))
    *_, draft_cache = extend(drafter, confirmed, draft_cache, jnp.array([length + kept]))
    wanted = drafter_cache_from_scratch(target, drafter, text[: length + kept + 1])
    np.testing.assert_allclose(draft_cache.k[:, :, :, : length + kept], wanted.k, atol=1e-4)
    np.testing.assert_allclose(draft_cache.v[:, :, :, : length + kept], wanted.v, atol=1e-4)


def test_a_jitted_proposal_equals_eager_steps(pair):
    target, drafter = pair
    prompt, root = [5, 9, 8, 7], 12
    _, _, draft_cache, aux = run_prefill(target, drafter, [prompt], 4)
    confirmed = confirmed_by_prefill(jnp.array([root]), aux, 5)
    length = jnp.array([len(prompt)])
    tree, _ = jax.jit(lambda *args: propose(drafter, *args, 4))(confirmed, draft_cache, length, jnp.array([root]))

    # By hand: the whole sequence of slots in one growing pass per draft token, without a cache.
    tokens, features = [*prompt[1:], root], None
    cache, empty = caches(target, drafter)
    none = jnp.zeros((1,), jnp.int32)
    out = target(jnp.array([prompt]), jnp.arange(4)[None], cache, none, capture=drafter.config.capture_layers)
    features = drafter.fuse(out.aux)
    wanted = []
    for _ in range(4):
        positions = jnp.arange(len(tokens))[None]
        step = drafter.step(drafter.embed_tokens(jnp.array([tokens])), features, positions, empty, none)
        token = int(drafter.to_target(drafter.logits(step.output[:, -1]).argmax(-1))[0])
        wanted.append(token)
        tokens.append(token)
        features = jnp.concatenate([features, step.feedback[:, -1:]], axis=1)
    assert tree.tokens[0].tolist() == [root, *wanted]
    assert tree.depth[0].tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(tree.ancestors[0], np.tril(np.ones((5, 5), bool)))


def test_rows_that_have_ended_do_not_change(pair):
    target, drafter = pair
    generator = Generator(target, drafter, num_draft_tokens=2)
    shape, prompts, limits = generator._batch([[5, 6, 7], [8, 9]], 16, (), 2)
    limits = type(limits)(jnp.array([16, 1]), limits.eos_token_ids)
    state = jax.jit(lambda *args: generator._start(shape, *args))(generator._parameters, prompts, limits)
    later = jax.jit(lambda s: speculative.run(target, drafter, s, limits, 2, jnp.int32(4)))(state)
    assert later.rounds.tolist() == [4, 0]
    assert later.length[1] == state.length[1] == 2
    assert later.emitted.tokens[1].tolist() == state.emitted.tokens[1].tolist()
    np.testing.assert_array_equal(later.cache.k[:, 1], state.cache.k[:, 1])


def test_feedback_stays_of_size_one_with_norm_output_and_grows_without():
    """EAGLE-3.1's second change: eight guesses deep, the fed-back state has not drifted away."""
    target = tiny.target()

    def sizes(norm_output: bool) -> list[float]:
        drafter = tiny.drafter(target, norm_output=norm_output)
        _, empty = caches(target, drafter)
        feature = jax.random.normal(jax.random.key(0), (1, 1, 32))
        none, found = jnp.zeros((1,), jnp.int32), []
        for k in range(8):
            embeddings = drafter.embed_tokens(jnp.array([[5 + k]]))
            feature = drafter.step(embeddings, feature, jnp.array([[k]]), empty, none).feedback
            found.append(float(jnp.sqrt(jnp.mean(feature**2))))
        return found

    np.testing.assert_allclose(sizes(True), 1.0, atol=1e-3)
    grown = sizes(False)
    assert grown[-1] > 2 * grown[0]
