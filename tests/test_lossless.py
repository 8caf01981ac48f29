"""Speculation gives the target's own greedy tokens, whatever the drafter guesses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scripted
import tiny
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from eagle_jax import sharding
from eagle_jax.generation import Generator
from eagle_jax.layers import cache as kv_cache

G = 4


def ragged_prompts(seed: int, lengths=(5, 1, 17, 40, 9)) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, tiny.VOCAB, n).tolist() for n in lengths]


PROMPTS = ragged_prompts(0)


@pytest.fixture(scope="module")
def target():
    return tiny.target()


@pytest.fixture(scope="module")
def plain(target):
    return Generator(target)


@pytest.fixture(scope="module")
def expected(plain):
    """What plain decoding says without end tokens; texts that end early are prefixes of these."""
    return [row.tokens for row in plain.generate(PROMPTS, max_new_tokens=24, eos_token_ids=()).rows]


def tokens_of(generator: Generator, prompts=PROMPTS, **options) -> list[list[int]]:
    return [row.tokens for row in generator.generate(prompts, **({"max_new_tokens": 24} | options)).rows]


def test_plain_decoding_equals_a_loop_without_a_cache(target, expected):
    """The oracle's own oracle: run the whole text through the target for every token."""

    @jax.jit
    def next_token(tokens, length):
        block = target.config.block
        empty = kv_cache.init(target.config.num_layers, 1, block.num_kv_heads, 0, block.head_dim, target.dtype)
        positions = np.arange(tokens.shape[1])[None]
        out = target(tokens, positions, empty, np.zeros(1, np.int32))
        return out.logits[0, length - 1].argmax()

    for prompt, answer in zip(PROMPTS[:3], expected[:3], strict=True):
        text = np.zeros((1, 64), np.int32)
        text[0, : len(prompt)] = prompt
        for i, token in enumerate(answer):
            assert next_token(text, len(prompt) + i) == token
            text[0, len(prompt) + i] = token


def test_random_texts_are_worth_comparing(expected):
    assert len({token for row in expected for token in row}) > 15


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"fc_norm": False, "norm_output": False},
        {"fc_norm": False, "norm_before_fc": True, "norm_before_residual": True},
        {"num_layers": 2},
        {"draft_vocab_size": 16, "own_head": True},
        {"block": {"hidden_size": 24, "mlp_size": 40}, "own_head": True, "own_embedding": True},
        {"block": {"sliding_window": 6}},
        {"max_position": 8},
    ],
    ids=["3.1", "3", "norm_before_fc", "two layers", "reduced vocabulary", "own width", "window", "short context"],
)
def test_random_drafters(target, expected, changes):
    generator = Generator(target, tiny.drafter(target, **changes), num_draft_tokens=G)
    assert tokens_of(generator, eos_token_ids=()) == expected


def test_perfect_drafter_needs_one_round_per_block(target, expected):
    drafter = scripted.ScriptedDrafter(target, scripted.whole_texts(PROMPTS, expected))
    result = Generator(target, drafter, num_draft_tokens=G).generate(PROMPTS, max_new_tokens=21, eos_token_ids=())
    assert [row.tokens for row in result.rows] == [row[:21] for row in expected]
    for row in result.rows:  # 21 = 1 from the prefill + 4 rounds of 5
        assert (row.rounds, row.accepted_per_position, row.cut_per_position) == (4, [4] * G, [0] * G)
    assert result.mean_acceptance_length == G + 1
    assert result.acceptance_per_position == [1.0] * G


def test_adversarial_drafter_costs_rounds_and_nothing_else(target, expected):
    wrong = (scripted.whole_texts(PROMPTS, expected) + 1) % tiny.VOCAB
    generator = Generator(target, scripted.ScriptedDrafter(target, wrong), num_draft_tokens=G)
    result = generator.generate(PROMPTS, max_new_tokens=24, eos_token_ids=())
    assert [row.tokens for row in result.rows] == expected
    assert [row.rounds for row in result.rows] == [23] * len(PROMPTS)
    assert result.mean_acceptance_length == 1.0


def test_drafter_that_always_says_end_ends_nothing(target, expected):
    table = np.full((len(PROMPTS), 80), 2, np.int32)
    generator = Generator(target, scripted.ScriptedDrafter(target, table), num_draft_tokens=G)
    ends = [row[: row.index(2) + 1] if 2 in row else row for row in expected]
    assert tokens_of(generator, eos_token_ids=(2,)) == ends


@given(st.integers(0, 2**31 - 1))
def test_drafters_right_here_and_wrong_there(target, expected, seed):
    """Any pattern of right and wrong guesses, in rows that advance at their own pace."""
    texts = scripted.whole_texts(PROMPTS, expected)
    wrong = np.random.default_rng(seed).random(texts.shape) < 0.4
    drafter = scripted.ScriptedDrafter(target, np.where(wrong, (texts + 7) % tiny.VOCAB, texts))
    generator = _scripted_generator(target, drafter)
    result = generator.generate(PROMPTS, max_new_tokens=24, eos_token_ids=())
    assert [row.tokens for row in result.rows] == expected
    for row, wrongs, prompt in zip(result.rows, wrong, PROMPTS, strict=True):
        assert (row.rounds, row.accepted_per_position) == _replay(wrongs[len(prompt) :], len(row.tokens))


_SHARED: dict[int, Generator] = {}


def _scripted_generator(target, drafter) -> Generator:
    """One compiled program for every table: only the parameters change."""
    from flax import nnx

    generator = _SHARED.setdefault(id(target), Generator(target, drafter, num_draft_tokens=G))
    generator._parameters = nnx.split((target, drafter))[1]
    return generator


def _replay(wrong: np.ndarray, total: int) -> tuple[int, list[int]]:
    """Rounds and emitted draft tokens per position, by hand."""
    emitted, rounds, accepted = 1, 0, [0] * G
    while emitted < total:
        rounds += 1
        for k in range(G):
            if wrong[emitted] or emitted >= total:
                break
            accepted[k] += 1
            emitted += 1
        if emitted < total:
            emitted += 1
    return rounds, accepted


@pytest.mark.parametrize("limit", range(1, 9))
def test_length_limits_inside_a_block(target, plain, expected, limit):
    perfect = scripted.ScriptedDrafter(target, scripted.whole_texts(PROMPTS, expected))
    for generator in (plain, _scripted_generator(target, perfect)):
        rows = generator.generate(PROMPTS, max_new_tokens=limit, eos_token_ids=()).rows
        assert [row.tokens for row in rows] == [row[:limit] for row in expected]
        assert {row.finish_reason for row in rows} == {"length"}


@pytest.mark.parametrize("position", range(12))
def test_end_token_at_every_position_of_a_block(target, plain, expected, position):
    """Declare the token at `position` the end token: everything behind its first occurrence is dropped."""
    perfect = scripted.ScriptedDrafter(target, scripted.whole_texts(PROMPTS, expected))
    ends = tuple({row[position] for row in expected})
    wanted = [row[: next(i for i, token in enumerate(row) if token in ends) + 1] for row in expected]
    for generator in (plain, _scripted_generator(target, perfect)):
        rows = generator.generate(PROMPTS, max_new_tokens=24, eos_token_ids=ends).rows
        assert [row.tokens for row in rows] == wanted
        assert {row.finish_reason for row in rows} == {"stop"}


def test_tokens_accepted_behind_the_end_are_not_counted(target, expected):
    """A round that accepts [d1, END, d3, d4] emits 2 tokens: 2 accepted, 2 cut."""
    prompt, answer = PROMPTS[2:3], expected[2:3]
    end = answer[0][2]
    assert answer[0].index(end) == 2
    perfect = scripted.ScriptedDrafter(target, scripted.whole_texts(prompt, answer))
    generator = Generator(target, perfect, num_draft_tokens=G)
    result = generator.generate(prompt, max_new_tokens=24, eos_token_ids=(end,))
    (row,) = result.rows
    assert row.tokens == answer[0][:3]  # 1 from the prefill + 2 of the round
    assert (row.rounds, row.accepted_per_position, row.cut_per_position) == (1, [1, 1, 0, 0], [0, 0, 1, 1])
    assert result.mean_acceptance_length == 2.0


def test_rows_equal_their_single_runs_and_any_batching(target, expected):
    generator = Generator(target, tiny.drafter(target), num_draft_tokens=3)
    for batch_size in (2, 8):
        assert tokens_of(generator, eos_token_ids=(), batch_size=batch_size) == expected


@pytest.mark.parametrize("chunk", [1, 3, 16, 64])
def test_prompts_longer_than_a_chunk(target, expected, chunk):
    generator = Generator(target, tiny.drafter(target), num_draft_tokens=3, prefill_chunk=chunk)
    assert tokens_of(generator, eos_token_ids=()) == expected


def test_chunks_leave_the_same_rounds(target):
    """The drafter's cache after a chunked prefill is that of one pass: its guesses, and so the rounds, agree."""
    results = []
    for chunk in (3, 64):
        generator = Generator(target, tiny.drafter(target, draft_vocab_size=2, own_head=True), prefill_chunk=chunk)
        result = generator.generate(PROMPTS, max_new_tokens=24, eos_token_ids=())
        results.append([(row.rounds, row.accepted_per_position) for row in result.rows])
    assert results[0] == results[1]


def test_streaming_gives_the_same_in_pieces(target, expected):
    generator = Generator(target, tiny.drafter(target), num_draft_tokens=3)
    *pieces, result = generator.stream(PROMPTS, max_new_tokens=24, eos_token_ids=(), rounds_per_call=2)
    assert len(pieces) > 3
    assert [[token for piece in pieces for token in piece[i]] for i in range(len(PROMPTS))] == expected
    assert [row.tokens for row in result.rows] == expected


def test_context_limit_ends_an_answer(expected):
    target = tiny.target(max_position=30)
    for drafter in (None, tiny.drafter(target)):
        generator = Generator(target, drafter)
        rows = generator.generate([PROMPTS[0], PROMPTS[2]], max_new_tokens=24, eos_token_ids=()).rows
        assert [len(row.tokens) for row in rows] == [24, 13]
        assert [row.tokens for row in rows] == [expected[0], expected[2][:13]]


def counts_of(result) -> list[tuple]:
    return [(row.tokens, row.rounds, row.accepted_per_position) for row in result.rows]


@pytest.fixture(scope="module")
def on_one_device():
    target = tiny.target()
    generator = Generator(target, tiny.drafter(target, **OWN_TABLES))
    return counts_of(generator.generate(PROMPTS, max_new_tokens=24, eos_token_ids=()))


OWN_TABLES = {"draft_vocab_size": 16, "own_head": True, "own_embedding": True}


@pytest.mark.parametrize("data, tensor", [(1, 2), (2, 1), (2, 2), (4, 2), (2, 4), (8, 1)])
@pytest.mark.parametrize("replicated", [False, True], ids=["split drafter", "whole drafter"])
def test_meshes(expected, on_one_device, data, tensor, replicated):
    """Also the drafter's own placement, rows that do not divide the data axis, and 2 kv heads on 4 tensor shards.

    Equal rounds and accepted counts say that the captured states are whole sums and the verdict one for all devices.
    """
    target = tiny.target()
    drafter = tiny.drafter(target, **OWN_TABLES)
    mesh = sharding.make_mesh(data, tensor)
    placement, draft_placement = sharding.Placement(mesh), sharding.Placement(mesh, replicated=replicated)
    sharding.place(target, placement)
    sharding.place(drafter, draft_placement)
    generator = Generator(target, drafter, placement=placement, draft_placement=draft_placement)
    result = generator.generate(PROMPTS, max_new_tokens=24, eos_token_ids=())
    assert counts_of(result) == on_one_device
    assert [row.tokens for row in result.rows] == expected
    if data == tensor:  # the streaming form is the same state, cut into calls
        *_, result = generator.stream(PROMPTS, max_new_tokens=24, eos_token_ids=())
        assert counts_of(result) == on_one_device


def test_bfloat16_leaves_the_plain_text_only_where_two_logits_nearly_tie():
    """A pass over G + 1 rows may round unlike a pass over one; that must not matter anywhere else."""
    target = tiny.target(dtype=jnp.bfloat16)
    drafter = tiny.drafter(target, dtype=jnp.bfloat16)
    plain = tokens_of(Generator(target), eos_token_ids=(), max_new_tokens=48)
    ours = tokens_of(Generator(target, drafter), eos_token_ids=(), max_new_tokens=48)
    exact = nnx.merge(*nnx.split(target))
    nnx.update(exact, jax.tree.map(lambda p: p.astype(jnp.float32), nnx.state(exact, nnx.Param)))
    for prompt, a, b in zip(PROMPTS, plain, ours, strict=True):
        differing = next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), None)
        if differing is None:
            continue
        logits = last_logits(exact, prompt + a[:differing])
        assert abs(logits[a[differing]] - logits[b[differing]]) < 0.05 * np.ptp(logits)


def last_logits(target, tokens: list[int]) -> np.ndarray:
    """[V] after a text, without a cache."""
    block = target.config.block
    empty = kv_cache.init(target.config.num_layers, 1, block.num_kv_heads, 0, block.head_dim, target.dtype)
    out = target(np.array([tokens]), np.arange(len(tokens))[None], empty, np.zeros(1, np.int32))
    return np.asarray(out.logits[0, -1])
