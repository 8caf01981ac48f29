"""The drafter against outputs of `speculators`' EAGLE-3 class (scripts/make_golden.py writes them)."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from canonical import set_parameters
from flax import nnx
from safetensors.numpy import load_file

from eagle_jax.checkpoint.drafter_checkpoint import open_drafter
from eagle_jax.config import BlockConfig, DrafterConfig, RotaryConfig
from eagle_jax.drafter import Eagle3Drafter
from eagle_jax.layers import cache as kv_cache

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = sorted(folder.name for folder in GOLDEN.iterdir())
TOLERANCE = 1e-5  # of the largest value compared


def read_config(folder: Path) -> DrafterConfig:
    """The case's configuration, read here by hand so that the test does not lean on the layout reader."""
    top = json.loads((folder / "config.json").read_text())
    nested = top["transformer_layer_config"]
    rope = dict(nested["rope_parameters"])
    rotary = RotaryConfig(kind=rope["rope_type"], base=rope["rope_theta"])
    if rope["rope_type"] == "llama3":
        rotary = RotaryConfig(
            kind="llama3",
            base=rope["rope_theta"],
            factor=rope["factor"],
            original_max_position=rope["original_max_position_embeddings"],
            low_freq_factor=rope["low_freq_factor"],
            high_freq_factor=rope["high_freq_factor"],
        )
    slides = "sliding_attention" in nested.get("layer_types", [])
    block = BlockConfig(
        hidden_size=nested["hidden_size"],
        num_heads=nested["num_attention_heads"],
        num_kv_heads=nested["num_key_value_heads"],
        head_dim=nested["head_dim"],
        mlp_size=nested["intermediate_size"],
        norm_eps=nested["rms_norm_eps"],
        qkv_bias=nested["attention_bias"],
        o_bias=nested["attention_bias"],
        mlp_bias=nested.get("mlp_bias", False),
        qk_norm=nested["model_type"] == "qwen3",
        activation=nested["hidden_act"],
        rotary=rotary,
        sliding_window=nested["sliding_window"] if slides else None,
    )
    ids = tuple(top["eagle_aux_hidden_state_layer_ids"])
    return DrafterConfig(
        block=block,
        num_layers=nested["num_hidden_layers"],
        target_hidden_size=nested["hidden_size"],
        vocab_size=nested["vocab_size"],
        draft_vocab_size=top["draft_vocab_size"],
        max_position=nested["max_position_embeddings"],
        capture_layers=ids,
        num_captured=len(ids),
        fc_bias=False,
        own_embedding=True,
        own_head=True,
        **{name: top[name] for name in ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")},
    )


def read_weights(folder: Path) -> dict[str, np.ndarray]:
    """The case's tensors under canonical paths."""
    stored = load_file(folder / "model.safetensors")
    values, per_state = {}, {}
    for name, tensor in stored.items():
        stem, kind = name.rpartition(".")[::2]
        if name == "d2t":
            values["draft_to_target"] = tensor + np.arange(len(tensor))
        elif name == "t2d":
            continue
        elif stem.startswith("fc_norm."):
            per_state[int(stem.removeprefix("fc_norm."))] = tensor
        elif stem in ("embed_tokens", "lm_head"):
            values[f"{stem.removesuffix('_tokens')}.weight"] = tensor
        elif kind == "bias":
            values[name] = tensor
        elif tensor.ndim == 2:
            values[f"{stem}.kernel"] = tensor.T
        else:
            values[f"{stem}.scale"] = tensor
    if per_state:
        values["fc_norm.scale"] = np.stack([per_state[i] for i in range(len(per_state))])
    return values


def build(folder: Path) -> Eagle3Drafter:
    drafter = Eagle3Drafter(read_config(folder), dtype=jnp.float32, rngs=nnx.Rngs(0))
    set_parameters(drafter, read_weights(folder))
    return drafter


def assert_close(ours: jax.Array, golden: np.ndarray, what: str) -> None:
    error = np.abs(np.asarray(ours) - golden).max() / np.abs(golden).max()
    assert error <= TOLERANCE, f"{what}: {error:.2e}"


@nnx.jit
def step(drafter, embeddings, features, positions, cache, lengths):
    out = drafter.step(embeddings, features, positions, cache, lengths)
    return out, drafter.logits(out.output)


def check_case(drafter: Eagle3Drafter, golden: dict[str, np.ndarray]) -> None:
    block, (steps, T, _) = drafter.config.block, golden["logits"].shape
    tokens = jnp.asarray(golden["tokens"], jnp.int32)
    features = drafter.fuse(jnp.asarray(golden["aux"])[None])
    assert_close(features[0], golden["fused"], "fused")

    def empty(batch: int):
        return kv_cache.init(
            drafter.config.num_layers, batch, block.num_kv_heads, T + steps, block.head_dim, jnp.float32
        )

    slots = jnp.arange(T)
    embeddings = drafter.embed_tokens(tokens)
    out, logits = step(drafter, embeddings[None], features, slots[None], empty(1), jnp.zeros(1, jnp.int32))
    assert_close(logits[0], golden["logits"][0], "logits of step 0")
    assert_close(out.feedback[0], golden["feedback"][0], "feedback of step 0")

    # One row per slot t: its cache holds slots 0 .. t of step 0, and its draft goes on from there.
    rows = T - steps + 1
    shared = jax.tree.map(lambda x: jnp.repeat(x, rows, axis=1), out.kv)
    cache = kv_cache.write(empty(rows), shared, jnp.zeros(rows, jnp.int32), slots[:rows] + 1)
    feedback = out.feedback[0, :rows, None]
    for j in range(1, steps):
        where = slots[:rows] + j
        out, logits = step(drafter, embeddings[where][:, None], feedback, where[:, None], cache, where)
        # The reference slides its window in step 0 only: beyond this row the two differ on purpose.
        valid = rows if block.sliding_window is None else min(rows, block.sliding_window - j)
        assert_close(logits[:valid, 0], golden["logits"][j, :valid], f"logits of step {j}")
        assert_close(out.feedback[:valid, 0], golden["feedback"][j, :valid], f"feedback of step {j}")
        cache = kv_cache.write(cache, out.kv, where, jnp.ones(rows, jnp.int32))
        feedback = out.feedback


@pytest.mark.parametrize("case", CASES)
def test_drafter_equals_speculators(case):
    check_case(build(GOLDEN / case), dict(np.load(GOLDEN / case / "golden.npz")))


@pytest.mark.parametrize("case", CASES)
def test_the_layout_reader_finds_the_same_drafter(case):
    checkpoint, values = open_drafter(GOLDEN / case), read_weights(GOLDEN / case)
    assert (checkpoint.layout, checkpoint.warnings) == ("speculators", [])
    assert checkpoint.config == read_config(GOLDEN / case)
    assert set(checkpoint.keys()) == set(values)
    for path, value in values.items():
        assert np.array_equal(checkpoint.read(path), value), path


@pytest.mark.parametrize("case", CASES)
def test_draft_ids_map_to_the_members_of_t2d(case):
    drafter, stored = build(GOLDEN / case), load_file(GOLDEN / case / "model.safetensors")
    members = np.flatnonzero(stored["t2d"]) if "t2d" in stored else np.arange(drafter.config.vocab_size)
    assert np.array_equal(drafter.to_target(jnp.arange(drafter.config.draft_vocab_size)), members)


def test_goldens_tell_the_variants_apart():
    """Each switch changes the outputs by far more than the tolerance, so a switch that is ignored cannot pass."""
    for case, flag in (
        ("eagle3_1", "norm_output"),
        ("recipe_default", "norm_before_residual"),
        ("norm_before_residual", "norm_before_residual"),
    ):
        folder = GOLDEN / case
        drafter = build(folder)
        changed = Eagle3Drafter(
            DrafterConfig(**{**vars(drafter.config), flag: not getattr(drafter.config, flag)}),
            dtype=jnp.float32,
            rngs=nnx.Rngs(0),
        )
        set_parameters(changed, read_weights(folder))
        with pytest.raises(AssertionError, match="of step"):
            check_case(changed, dict(np.load(folder / "golden.npz")))
