"""Every layout: what is written reads back as it was, and other projects' files mean here what they mean there."""

import dataclasses
import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from canonical import parameters
from drafter_folders import (
    SHARED_DRAFTERS,
    drafter_config,
    flat_values,
    random_arrays,
    stored_arrays,
    write_folder,
)
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from eagle_jax.checkpoint.drafter_checkpoint import DrafterCheckpoint, open_drafter
from eagle_jax.checkpoint.export import export_drafter
from eagle_jax.checkpoint.keymap import plan
from eagle_jax.checkpoint.layouts import LAYOUTS, WRITABLE
from eagle_jax.checkpoint.layouts.base import DRAFT_TO_TARGET, Facts, drafter_shapes
from eagle_jax.config import BlockConfig, DrafterConfig, RotaryConfig
from eagle_jax.drafter import Eagle3Drafter
from eagle_jax.errors import ConfigError

LLAMA3 = RotaryConfig("llama3", 5e5, 8.0, 8192, 1.0, 4.0)
YARN = RotaryConfig("yarn", 1.5e5, 32.0, 4096, beta_fast=32.0, beta_slow=1.0, truncate=False)
CASES = {
    "eagle3.1": {},
    "eagle3": {"fc_norm": False, "norm_output": False},
    "full_vocabulary": {"draft_vocab_size": 24},
    "own_embedding": {"own_embedding": True},
    "shared_head": {"draft_vocab_size": 24, "own_head": False},
    "no_ids": {"capture_layers": None},
    "four_captures": {"capture_layers": (1, 2, 3, 4), "num_captured": 4},
    "wide_target": {"target_hidden_size": 20, "own_embedding": True},
    "llama3_rope": {"block": {"rotary": LLAMA3}},
    "yarn_rope": {"block": {"rotary": YARN}},
    "norm_before_fc": {"fc_norm": False, "norm_before_fc": True},
    "norm_before_residual": {"norm_before_residual": True},
    "qwen3": {"block": {"qk_norm": True}},
    "biases": {"block": {"qkv_bias": True, "o_bias": True, "mlp_bias": True}},
    "window": {"block": {"sliding_window": 5}},
    "two_layers": {"num_layers": 2},
    "fc_bias": {"fc_bias": True},
    "embeddings_captured": {"capture_layers": (0, 3, 5)},
}
# What no reader of the layout can run or say.
REFUSED = {
    "safeailab": {"shared_head", "qwen3", "biases", "window", "two_layers"},
    "sglang": {"norm_before_fc", "norm_before_residual", "qwen3", "biases", "window", "embeddings_captured"},
    "vllm": {"fc_bias"},
    "speculators": {"fc_bias"},
    "orbax": set(),
}


@pytest.mark.parametrize("case", CASES)
def test_shapes_are_the_drafters(case):
    config = drafter_config(**CASES[case])
    model = nnx.eval_shape(lambda: Eagle3Drafter(config, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    assert drafter_shapes(config) == {path: leaf.shape for path, leaf in parameters(model).items()}


@pytest.mark.parametrize("layout", WRITABLE)
@pytest.mark.parametrize("case", CASES)
def test_round_trip(tmp_path, layout, case):
    config = drafter_config(**CASES[case])
    arrays = random_arrays(config, dtype=(np.float16, ml_dtypes.bfloat16, np.float32)[len(case) % 3])
    drafter = DrafterCheckpoint.from_arrays(config, arrays)
    if case in REFUSED[layout]:
        with pytest.raises(ConfigError, match=r"layout"):
            export_drafter(drafter, tmp_path / "out", layout)
        assert list(tmp_path.iterdir()) == []
        return
    export_drafter(drafter, tmp_path / "out", layout)
    found = open_drafter(tmp_path / "out")
    # With `layers.N` names there is nothing left that only SGLang would write.
    assert found.layout == ("vllm" if (layout, case) == ("sglang", "two_layers") else layout)
    assert found.config == config
    assert set(found.keys()) == set(arrays)
    for path, array in arrays.items():
        assert found.info(path).shape == array.shape and found.info(path).dtype == array.dtype
        assert found.read(path).dtype == array.dtype and found.read(path).tobytes() == array.tobytes(), path
        index = tuple(slice(size // 3, size // 2 + 1) for size in array.shape)
        np.testing.assert_array_equal(found.read(path, index), array[index])
    assert found.warnings == ([] if config.capture_layers or layout == "orbax" else [found.warnings[0]])


POSITIVE = st.floats(1e-3, 1e7)
ROTARY = st.one_of(
    st.builds(RotaryConfig, st.just("default"), POSITIVE),
    st.builds(RotaryConfig, st.just("linear"), POSITIVE, POSITIVE),
    st.builds(RotaryConfig, st.just("llama3"), POSITIVE, POSITIVE, st.integers(1, 9999), POSITIVE, POSITIVE),
    st.builds(
        RotaryConfig,
        st.just("yarn"),
        POSITIVE,
        POSITIVE,
        st.integers(1, 9999),
        beta_fast=POSITIVE,
        beta_slow=POSITIVE,
        attention_factor=st.none() | POSITIVE,
        mscale=st.none() | POSITIVE,
        mscale_all_dim=st.none() | POSITIVE,
        truncate=st.booleans(),
    ),
)


@st.composite
def drafter_configs(draw):
    flag, size = st.booleans(), st.integers(1, 40)
    kv_heads, vocab, count = draw(st.integers(1, 3)), draw(size), draw(st.integers(1, 5))
    ids = draw(st.none() | st.sets(st.integers(0, 30), min_size=count, max_size=count))
    block = BlockConfig(
        hidden_size=draw(size),
        num_heads=kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=kv_heads,
        head_dim=2 * draw(size),
        mlp_size=draw(size),
        norm_eps=draw(POSITIVE),
        qkv_bias=draw(flag),
        o_bias=draw(flag),
        mlp_bias=draw(flag),
        qk_norm=draw(flag),
        activation=draw(st.sampled_from(["silu", "gelu", "gelu_tanh"])),
        rotary=draw(ROTARY),
        sliding_window=draw(st.none() | size),
    )
    own_embedding, own_head, fc_norm = draw(flag), draw(flag), draw(flag)
    return DrafterConfig(
        block=block,
        num_layers=draw(st.integers(1, 3)),
        target_hidden_size=draw(size) if own_embedding and own_head else block.hidden_size,
        vocab_size=vocab,
        draft_vocab_size=draw(st.integers(1, vocab)) if own_head else vocab,
        max_position=draw(size),
        capture_layers=None if ids is None else tuple(sorted(ids)),
        num_captured=count,
        fc_norm=fc_norm,
        norm_before_fc=draw(flag) and not fc_norm,
        norm_output=draw(flag),
        norm_before_residual=draw(flag),
        fc_bias=draw(flag),
        own_embedding=own_embedding,
        own_head=own_head,
    )


@pytest.mark.parametrize("layout", WRITABLE)
@settings(max_examples=150, deadline=None)
@given(config=drafter_configs())
def test_the_written_configuration_reads_back_equal(layout, config):
    chosen = LAYOUTS[layout]
    if chosen.cannot_store(config):
        return
    try:
        written = chosen.write_config(config, "bfloat16", None)
    except ConfigError as error:
        assert 0 in config.capture_layers and "boundary 0" in str(error)
        return
    shapes = drafter_shapes(config)
    shapes.pop(DRAFT_TO_TARGET, None)
    facts = Facts("config.json", {piece.path: piece.shape for piece in plan(chosen.write_rules(config), shapes)})
    found, _ = chosen.read_config(json.loads(json.dumps(written)), facts, "feedback")
    assert found == config


# Other projects' folders, with the names and keys those projects write.

CONFIG = drafter_config()
ARRAYS = random_arrays(CONFIG, 3, np.float16)
PLAIN = dataclasses.replace(CONFIG, fc_norm=False, norm_output=False)
PLAIN_ARRAYS = {path: array for path, array in ARRAYS.items() if path != "fc_norm.scale"}
EAGLE_CONFIG = {
    "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}


def assert_reads(folder, layout, config, arrays):
    found = open_drafter(folder)
    assert (found.layout, found.config) == (layout, config)
    for path, array in arrays.items():
        np.testing.assert_array_equal(found.read(path), array, path)
    assert open_drafter(folder, layout=layout).config == config
    return found


def test_safeailab(tmp_path):
    """fp16, both tables, no switches, no ids, head_dim derived."""
    config = drafter_config(block={"head_dim": 4}, fc_norm=False, norm_output=False, capture_layers=None)
    arrays = random_arrays(config, 1, np.float16)
    values = flat_values(config, head_dim=None, rope_scaling=None, pretraining_tp=1, bos_token_id=1, eos_token_id=2)
    found = assert_reads(write_folder(tmp_path, values, stored_arrays(config, arrays)), "safeailab", config, arrays)
    assert len(found.warnings) == 1 and "names no captured layers" in found.warnings[0]
    # Their trainer's rotary base is 10000 whatever the configuration says.
    write_folder(tmp_path, flat_values(config, rope_theta=1e6), stored_arrays(config, arrays))
    assert "SafeAILab's trainer ignores it" in open_drafter(tmp_path).warnings[-1]


def test_safeailab_bin(tmp_path):
    torch = pytest.importorskip("torch")
    write_folder(tmp_path, flat_values(PLAIN), {})
    (tmp_path / "model.safetensors").unlink()
    stored = {name: torch.from_numpy(array) for name, array in stored_arrays(PLAIN, PLAIN_ARRAYS).items()}
    torch.save(stored, tmp_path / "pytorch_model.bin")
    assert_reads(tmp_path, "safeailab", dataclasses.replace(PLAIN, capture_layers=None), PLAIN_ARRAYS)


def test_specforge(tmp_path):
    """Own embedding, both tables at full vocabulary, both rotary forms, nested ids."""
    config = drafter_config(block={"rotary": LLAMA3}, draft_vocab_size=24, own_embedding=True)
    arrays = random_arrays(config, 2)
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    values = flat_values(
        config,
        architectures=["LlamaForCausalLMEagle3"],
        rope_theta=5e5,
        rope_scaling=scaling,
        rope_parameters=scaling | {"rope_theta": 5e5},
        fc_norm=True,
        norm_output=True,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 4]},
    )
    stored = stored_arrays(config, arrays) | {"d2t": np.zeros(24, np.int64), "t2d": np.ones(24, np.bool_)}
    found = assert_reads(write_folder(tmp_path, values, stored), "sglang", config, arrays)
    assert "norm_output_meaning='specforge'" in found.warnings[-1]
    # The other meaning of the flag is asked for, never guessed.
    other = open_drafter(tmp_path, norm_output_meaning="specforge")
    assert other.config == dataclasses.replace(config, norm_output=False)
    assert not any("norm_output" in warning for warning in other.warnings)
    write_folder(tmp_path, values | {"norm_output": False}, stored)
    assert open_drafter(tmp_path).config.norm_output is False
    with pytest.raises(ConfigError, match="the head reads the state without the norm"):
        open_drafter(tmp_path, norm_output_meaning="specforge")


@pytest.mark.parametrize("vllm_form", [False, True])
def test_torchspec(tmp_path, vllm_form):
    eagle = EAGLE_CONFIG
    top = {}
    if vllm_form:  # both lists are shifted
        eagle = EAGLE_CONFIG | {"eagle_aux_hidden_state_layer_ids": [2, 3, 5]}
        top = {"eagle_aux_hidden_state_layer_ids": [2, 3, 5]}
    values = flat_values(
        CONFIG,
        architectures=["LlamaForCausalLMEagle3"],
        _torchspec_version="0.3",
        fc_norm=True,
        norm_output=True,
        num_aux_hidden_states=3,
        eagle_config=eagle,
        **top,
    )
    stored = stored_arrays(CONFIG, ARRAYS, layer="layers.0." if vllm_form else "midlayer.")
    found = assert_reads(write_folder(tmp_path, values, stored), "torchspec", CONFIG, ARRAYS)
    assert ("SGLang would add 1" in found.warnings[0]) == vllm_form


def test_modelopt(tmp_path):
    eagle = EAGLE_CONFIG | {"next_layer_regular": True, "parallel_draft_step": 1, "parallel_draft_heads_num_layers": 0}
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 2048}
    values = flat_values(
        PLAIN,
        architectures=["LlamaForCausalLMEagle3"],
        attention_bias=False,
        mlp_bias=False,
        rope_theta=1e4,
        rope_scaling=yarn,
        eagle_config=eagle,
    )
    stored = stored_arrays(PLAIN, PLAIN_ARRAYS, layer="layers.0.")
    del stored["t2d"]
    rotary = RotaryConfig("yarn", 1e4, 32.0, 2048, beta_fast=32.0, beta_slow=1.0)
    config = dataclasses.replace(PLAIN, block=dataclasses.replace(PLAIN.block, rotary=rotary))
    assert_reads(write_folder(tmp_path, values, stored), "modelopt", config, PLAIN_ARRAYS)


def test_automodel(tmp_path):
    """Everything but the head under `model.`; the depth in the configuration is the target's; no ids."""
    config = dataclasses.replace(CONFIG, own_embedding=True, capture_layers=None)
    arrays = random_arrays(config, 5, ml_dtypes.bfloat16)
    values = flat_values(
        config,
        architectures=["LlamaEagle3DraftModel"],
        num_hidden_layers=30,
        target_hidden_size=16,
        num_aux_hidden_states=3,
        fc_norm=True,
        norm_output=True,
        parallel_drafting=False,
        attn_implementation="sdpa",
        tie_word_embeddings=True,
    )
    stored = stored_arrays(config, arrays, layer="layers.0.", prefix="model.")
    for table in ("d2t", "t2d"):
        assert table in stored
    assert_reads(write_folder(tmp_path, values, stored), "automodel", config, arrays)


def test_vllm_with_ids_at_the_top_only(tmp_path):
    values = flat_values(
        PLAIN,
        architectures=["LlamaForCausalLMEagle3"],
        eagle_aux_hidden_state_layer_ids=[2, 3, 5],
        norm_before_fc=False,
    )
    folder = write_folder(tmp_path, values, stored_arrays(PLAIN, PLAIN_ARRAYS, layer="layers.0."))
    assert assert_reads(folder, "vllm", PLAIN, PLAIN_ARRAYS).warnings == []


def test_what_vllm_and_sglang_read_in_a_written_file(tmp_path):
    """The flags are explicit, and both numberings name the same layers."""
    drafter = DrafterCheckpoint.from_arrays(CONFIG, ARRAYS)
    for layout in ("safeailab", "sglang", "vllm"):
        export_drafter(drafter, tmp_path / layout, layout)
        values = json.loads((tmp_path / layout / "config.json").read_text())
        assert values["eagle_aux_hidden_state_layer_ids"] == [2, 3, 5]
        assert values["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
        assert values["num_aux_hidden_states"] == 3 and values["draft_vocab_size"] == 8
        assert (values["fc_norm"], values["norm_output"]) == (True, True)
        assert (values["norm_before_fc"], values["norm_before_residual"]) == (False, False)
        assert (values["head_dim"], values["target_hidden_size"]) == (6, 16)
        assert values["rope_theta"] == 10000.0 and values["tie_word_embeddings"] is False
        stored = load_file(tmp_path / layout / "model.safetensors")
        assert stored["d2t"].dtype == np.int64 and stored["t2d"].dtype == np.bool_ and stored["t2d"].sum() == 8
        assert ("layers.0.hidden_norm.weight" in stored) == (layout == "vllm")
        assert values["architectures"] == ["LlamaForCausalLM" if layout == "safeailab" else "LlamaForCausalLMEagle3"]


def test_later_blocks_carry_both_norms_where_servers_disagree(tmp_path):
    config = drafter_config(num_layers=2)
    drafter = DrafterCheckpoint.from_arrays(config, random_arrays(config))
    for layout in ("vllm", "sglang"):
        export_drafter(drafter, tmp_path / layout, layout)
        stored = load_file(tmp_path / layout / "model.safetensors")
        np.testing.assert_array_equal(stored["layers.1.hidden_norm.weight"], stored["layers.1.input_layernorm.weight"])


@pytest.mark.skipif(not SHARED_DRAFTERS.is_dir(), reason="no drafters beside the checkout")
@pytest.mark.parametrize("name", ["smollm2-135m-eagle3", "smollm2-135m-eagle3.1"])
def test_real_drafters(tmp_path, name):
    drafter = open_drafter(SHARED_DRAFTERS / name)
    assert drafter.config.capture_layers == (2, 15, 27) and drafter.warnings == []
    assert drafter.config.fc_norm == drafter.config.norm_output == name.endswith("3.1")
    raw = load_file(SHARED_DRAFTERS / name / "model.safetensors")
    for layout in ("safeailab", "sglang"):
        export_drafter(drafter, tmp_path / layout, layout)
        written = load_file(tmp_path / layout / "model.safetensors")
        assert {n: (a.dtype, a.tobytes()) for n, a in written.items()} == {
            n: (a.dtype, a.tobytes()) for n, a in raw.items()
        }
