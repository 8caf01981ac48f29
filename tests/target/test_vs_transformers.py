"""Every family against `transformers`, fp32: logits and every boundary, with and without cache, chunked, padded."""

import dataclasses

import hf_models
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from canonical import parameters
from hf_models import assert_close

from eagle_jax.checkpoint.load import load_target
from eagle_jax.layers import cache as kv_cache
from eagle_jax.target.decoder import Decoder

CASES = {
    "llama": ("Llama", {"num_key_value_heads": 6}),
    "llama_gqa_tied": ("Llama", {"tie_word_embeddings": True}),
    "llama_one_kv_head": ("Llama", {"num_key_value_heads": 1}),
    "llama_biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_head_dim": ("Llama", {"head_dim": 8}),
    "llama_gelu": ("Llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "smollm2": (
        "Llama",
        {
            "hidden_size": 36,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        },
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral_window": ("Mistral", {"sliding_window": 5, "head_dim": 8}),
    "qwen2": ("Qwen2", {}),
    "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2_window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
    "qwen3_biases": ("Qwen3", {"head_dim": 6, "attention_bias": True}),
    "qwen3_window": ("Qwen3", {"head_dim": 8, "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
}
LENGTH = 16


@dataclasses.dataclass
class Case:
    theirs: transformers.PreTrainedModel
    ours: Decoder
    tokens: np.ndarray
    expected: hf_models.Reference


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory) -> Case:
    family, fields = CASES[request.param]
    theirs = hf_models.make(family, **fields)
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder)
    tokens = np.random.default_rng(1).integers(hf_models.SIZES["vocab_size"], size=LENGTH)
    return Case(theirs, hf_models.decoder(folder), tokens, hf_models.reference(theirs, tokens))


@pytest.mark.parametrize("sizes", [[LENGTH], [7, 1, 7, 1], [1] * LENGTH], ids=["whole", "chunks", "token_by_token"])
def test_logits_and_every_boundary(case, sizes):
    """The unused slots of the cache hold large numbers, which must not reach any token."""
    logits, boundaries, hidden = hf_models.run_in_chunks(case.ours, case.tokens, sizes, fill=1e6)
    assert_close(logits, case.expected.logits, "logits")
    assert_close(hidden, case.expected.hidden, "hidden")
    for i, (ours, theirs) in enumerate(zip(boundaries, case.expected.boundaries, strict=True)):
        assert_close(ours, theirs, f"boundary {i}")


def test_ragged_batch_then_decode(case):
    """Rows of 9, 4 and 1 tokens, padded on the right; then each row goes on at its own place, token by token."""
    counts, T, slots = np.array([9, 4, 1]), 9, 16
    rows = np.stack([np.roll(case.tokens, -row) for row in range(3)])
    expected = [hf_models.reference(case.theirs, row[:13]) for row in rows]
    logits, cache = [], None
    for filler in (0, 40):  # the padding's ids must not matter
        padded = np.where(np.arange(T) < counts[:, None], rows[:, :T], filler)
        cache = hf_models.empty_cache(case.ours, 3, slots)
        positions = jnp.broadcast_to(jnp.arange(T), (3, T))
        out = hf_models.forward(case.ours, jnp.asarray(padded), positions, cache, jnp.zeros(3, jnp.int32), (1, 4))
        logits.append(np.asarray(out.logits))
        cache = kv_cache.write(cache, out.kv, jnp.zeros(3, jnp.int32), jnp.asarray(counts))
    for row, count in enumerate(counts):
        assert np.array_equal(logits[0][row, :count], logits[1][row, :count]), "padding changed a real token"
        assert_close(logits[0][row, :count], expected[row].logits[:count], f"row {row}")
        for slot, boundary in enumerate((1, 4)):
            assert_close(out.aux[row, :count, slot], expected[row].boundaries[boundary, :count], f"row {row}")
    for j in range(3):
        at = counts + j
        now = jnp.asarray(rows[np.arange(3), at][:, None])
        out = hf_models.forward(case.ours, now, jnp.asarray(at)[:, None], cache, jnp.asarray(at), (1, 4))
        cache = kv_cache.write(cache, out.kv, jnp.asarray(at), jnp.ones(3, jnp.int32))
        for row in range(3):
            assert_close(out.logits[row, 0], expected[row].logits[at[row]], f"row {row} after {j} more")
            assert_close(out.aux[row, 0, 1], expected[row].boundaries[4, at[row]], f"row {row} after {j} more")


def test_the_last_boundary_gives_the_logits(case):
    """Boundary L through the final norm and the head is the model's answer; boundary L - 1 is not."""
    _, boundaries, _ = hf_models.run_in_chunks(case.ours, case.tokens, [LENGTH])
    last = np.asarray(case.ours.logits(case.ours.norm(jnp.asarray(boundaries[-1]))))
    one_early = np.asarray(case.ours.logits(case.ours.norm(jnp.asarray(boundaries[-2]))))
    assert_close(last, case.expected.logits, "logits")
    with pytest.raises(AssertionError):
        assert_close(one_early, case.expected.logits, "logits")


def test_the_loader_reads_the_same_model_from_shards(case, tmp_path):
    case.theirs.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    loaded = load_target(tmp_path)
    assert loaded.config.block == case.ours.config.block
    expected, found = parameters(case.ours), parameters(loaded.model)
    assert set(found) == set(expected)
    for path, value in expected.items():
        assert np.array_equal(found[path][...], value[...]), path
