"""Drafters that must not load, each refused by name."""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest
from drafter_folders import (
    IDS,
    PLAIN,
    PLAIN_ARRAYS,
    PLAIN_STORED,
    drafter_config,
    flat_values,
    plain_folder,
    random_arrays,
    refuse,
    stored_arrays,
    write_folder,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_jax.checkpoint.drafter_checkpoint import DrafterCheckpoint, open_drafter
from eagle_jax.checkpoint.export import export_drafter
from eagle_jax.checkpoint.layouts import WRITABLE, detect
from eagle_jax.errors import CheckpointError, EagleJaxError


def test_the_folder_itself_is_good(tmp_path):
    assert open_drafter(plain_folder(tmp_path)).config == PLAIN


# Other methods


@pytest.mark.parametrize(
    ("changes", "tensors", "words"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, {}, ["quantization_config"]),
        ({}, {"midlayer.mlp.up_proj.weight_scale": np.ones(1, np.float32)}, ["weight_scale", "quantised"]),
        ({"kv_lora_rank": 512}, {}, ["kv_lora_rank", "latent attention"]),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, {}, ["Eagle3DeepseekV2ForCausalLM", "latent attention"]),
        ({"model_type": "kimi_k2"}, {}, ["model_type", "kimi_k2"]),
        ({}, {"midlayer.self_attn.kv_b_proj.weight": np.ones((2, 2), np.float32)}, ["latent attention"]),
        ({}, {"mask_hidden": np.ones(48, np.float32)}, ["mask_hidden", "P-EAGLE"]),
        ({"parallel_drafting": True}, {}, ["parallel_drafting"]),
        ({"eagle_config": {"parallel_draft_step": 4}}, {}, ["eagle_config", "parallel_draft_step"]),
        ({"eagle_config": {"use_aux_hidden_state": False}}, {}, ["use_aux_hidden_state", "False"]),
        ({"use_aux_hidden_state": False}, {}, ["use_aux_hidden_state"]),
        ({"eagle_config": {"use_last_layernorm": False}}, {}, ["use_last_layernorm"]),
        ({"eagle_config": {"layer_ids": [1, 2, 3]}}, {}, ["eagle_config", "unknown keys ['layer_ids']"]),
        ({"rope_scaling": {"rope_type": "foo", "factor": 2.0}}, {}, ["rope_type", "'foo' is not supported"]),
        ({"hidden_act": "relu"}, {}, ["hidden_act", "relu"]),
        ({"logit_scale": 0.5}, {}, ["unknown keys ['logit_scale']"]),
    ],
)
def test_what_is_not_an_eagle3_drafter_of_this_kind(tmp_path, changes, tensors, words):
    refuse(plain_folder(tmp_path, changes, tensors), *words)


def test_eagle_1_head(tmp_path):
    """fc reads the embedding and one state; there is no hidden_norm."""
    stored = {
        "fc.weight": np.ones((16, 32), np.float32),
        "fc.bias": np.ones(16, np.float32),
        "layers.0.self_attn.q_proj.weight": np.ones((24, 16), np.float32),
        "layers.0.post_attention_layernorm.weight": np.ones(16, np.float32),
        "embed_tokens.weight": np.ones((24, 16), np.float32),
    }
    refuse(write_folder(tmp_path, flat_values(PLAIN), stored), "EAGLE-1 or EAGLE-2")


def test_quantised_export_of_modelopt(tmp_path):
    path = plain_folder(tmp_path)
    (path / "hf_quant_config.json").write_text("{}")
    refuse(path, "hf_quant_config.json")


def test_peagle_of_speculators(tmp_path):
    export_drafter(DrafterCheckpoint.from_arrays(PLAIN, PLAIN_ARRAYS), tmp_path / "s", "speculators")
    values = json.loads((tmp_path / "s/config.json").read_text())
    (tmp_path / "s/config.json").write_text(json.dumps(values | {"speculators_model_type": "peagle"}))
    refuse(tmp_path / "s", "speculators_model_type", "P-EAGLE")


def test_neither_names_nor_keys_of_a_drafter(tmp_path):
    refuse(write_folder(tmp_path, {}, {"wte": np.ones(2)}), "not an EAGLE-3 drafter", "wte")
    with pytest.raises(CheckpointError, match="found: none"):
        detect([], {})
    refuse(tmp_path / "nothing", "no such folder")


def test_a_layout_nobody_knows(tmp_path):
    with pytest.raises(CheckpointError, match="unknown layout 'medusa'"):
        open_drafter(plain_folder(tmp_path), layout="medusa")


# Tensors (B02, B03, B04, B08, B09, B11)


@pytest.mark.parametrize("name", sorted(PLAIN_STORED))
def test_every_tensor_is_needed(tmp_path, name):
    if name == "t2d":  # no server reads it, Model-Optimizer never writes it
        assert open_drafter(plain_folder(tmp_path, drop=[name])).config == PLAIN
        return
    refuse(plain_folder(tmp_path, drop=[name]), {"lm_head.weight": "lm_head"}.get(name, name))


def test_a_stray_tensor_or_a_wrong_shape(tmp_path):
    refuse(plain_folder(tmp_path, tensors={"midlayer.extra.weight": np.ones(2)}), "unknown: midlayer.extra.weight")
    wrong = {"midlayer.mlp.up_proj.weight": np.ones((16, 20), np.float32)}
    refuse(plain_folder(tmp_path, tensors=wrong), "midlayer.mlp.up_proj.weight is [16, 20]", "wants [20, 16]")
    refuse(plain_folder(tmp_path, tensors={"norm.weight": np.ones(16, np.int32)}), "norm.weight is int32")
    refuse(plain_folder(tmp_path, {"num_hidden_layers": 10**9}), "num_hidden_layers", "holds 1 blocks")
    refuse(plain_folder(tmp_path, {"num_aux_hidden_states": 10**9, **IDS}), "fc.weight is [16, 48]")


def test_the_feature_width_is_the_fan_in_of_fc(tmp_path):
    """B11: three states of width 16 are 48; a drafter for another target never passes."""
    refuse(plain_folder(tmp_path, {"target_hidden_size": 20}), "fc.weight is [16, 48]", "want [16, 60]")
    refuse(plain_folder(tmp_path, {"eagle_aux_hidden_state_layer_ids": [2, 3]}), "2 captured states", "want [16, 32]")


def test_a_missing_head_is_only_borrowed_at_full_vocabulary(tmp_path):
    """B02."""
    refuse(plain_folder(tmp_path, drop=["lm_head.weight"]), "needs the drafter's own lm_head")
    full = plain_folder(tmp_path, {"draft_vocab_size": 24}, drop=["lm_head.weight", "d2t", "t2d"])
    assert open_drafter(full).config.own_head is False
    borrowed = drafter_config(draft_vocab_size=24, own_head=False)
    written = DrafterCheckpoint.from_arrays(borrowed, random_arrays(borrowed))
    export_drafter(written, tmp_path / "sglang", "sglang")
    # SGLang borrows the head when the size is null, and leaves it random when a size is given.
    assert json.loads((tmp_path / "sglang/config.json").read_text())["draft_vocab_size"] is None


@pytest.mark.parametrize("layout", WRITABLE)
def test_own_tables_win_and_are_never_invented(tmp_path, layout):
    """B01, B03: what the file carries is used bit for bit, and nothing else is exported."""
    own = dataclasses.replace(PLAIN, own_embedding=True)
    arrays = random_arrays(own, 4)
    export_drafter(DrafterCheckpoint.from_arrays(own, arrays), tmp_path / "own", layout)
    np.testing.assert_array_equal(open_drafter(tmp_path / "own").read("embed.weight"), arrays["embed.weight"])
    export_drafter(DrafterCheckpoint.from_arrays(PLAIN, PLAIN_ARRAYS), tmp_path / "shared", layout)
    assert "embed.weight" not in open_drafter(tmp_path / "shared").keys()  # noqa: SIM118 (not a dict)


def test_a_drafter_of_another_width_has_its_own_embedding(tmp_path):
    """B04: target 16, drafter 12, three states: fc (48, 12), embedding (V, 12)."""
    config = drafter_config(block={"hidden_size": 12}, own_embedding=True)
    arrays = random_arrays(config)
    path = write_folder(
        tmp_path, flat_values(config, target_hidden_size=16, fc_norm=True, **IDS), stored_arrays(config, arrays)
    )
    found = open_drafter(path)
    assert found.info("fc.kernel").shape == (48, 12) and found.info("embed.weight").shape == (24, 12)
    (path / "model.safetensors").unlink()
    stored = stored_arrays(config, arrays)
    del stored["embed_tokens.weight"]
    write_folder(tmp_path, flat_values(config, target_hidden_size=16, fc_norm=True, **IDS), stored)
    refuse(path, "needs its own embed_tokens")


def test_biases_are_read_off_the_file(tmp_path):
    """B09."""
    assert open_drafter(plain_folder(tmp_path, tensors={"fc.bias": np.ones(16, np.float32)})).config.fc_bias
    refuse(plain_folder(tmp_path, {"bias": True}), "bias: True, but the file lacks fc.bias")
    refuse(plain_folder(tmp_path, {"attention_bias": True}), "attention_bias: True, but the file lacks the biases")
    biases = {f"midlayer.self_attn.{n}_proj.bias": np.ones(s, np.float32) for n, s in (("q", 24), ("k", 12), ("v", 12))}
    block = open_drafter(plain_folder(tmp_path, tensors=biases)).config.block
    assert (block.qkv_bias, block.o_bias) == (True, False)
    refuse(
        plain_folder(tmp_path, {"attention_bias": False}, biases),
        "attention_bias: False, but the file holds the biases",
    )


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_weights_name_the_tensor(tmp_path, dtype, value):
    arrays = {path: a if path == "draft_to_target" else a.astype(dtype) for path, a in PLAIN_ARRAYS.items()}
    arrays["layers.0.mlp.up_proj.kernel"][3, 2] = value
    found = open_drafter(write_folder(tmp_path, flat_values(PLAIN), stored_arrays(PLAIN, arrays)))
    with pytest.raises(CheckpointError, match=r"NaN or infinite weights in midlayer.mlp.up_proj.weight"):
        found.read("layers.0.mlp.up_proj.kernel")
    found.read("norm.scale")


# Fuzz

JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)
KEYS = [
    *sorted(flat_values(PLAIN)),
    "eagle_aux_hidden_state_layer_ids",
    "eagle_config",
    "fc_norm",
    "layer_types",
    "norm_before_fc",
    "num_aux_hidden_states",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "speculators_model_type",
    "target_hidden_size",
    "tie_word_embeddings",
    "transformer_layer_config",
    "format",
]


@settings(max_examples=300, deadline=None)
@given(changes=st.dictionaries(st.sampled_from(KEYS), JUNK, min_size=1, max_size=3))
def test_fuzzed_configurations(tmp_path_factory, changes):
    path = write_folder(tmp_path_factory.mktemp("fuzz"), flat_values(PLAIN) | changes, PLAIN_STORED)
    try:
        found = open_drafter(path)
    except EagleJaxError as error:
        assert str(path) in str(error)
    else:
        assert found.read("fc.kernel").shape == (48, 16)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_fuzzed_tensors(tmp_path_factory, data):
    stored = dict(PLAIN_STORED)
    for name in data.draw(st.lists(st.sampled_from(sorted(PLAIN_STORED)), min_size=1, max_size=3, unique=True)):
        change = data.draw(st.sampled_from(["drop", "cut", "flatten", "rename", "integers"]))
        array = stored.pop(name)
        if change == "cut":
            stored[name] = array[:-1]
        elif change == "flatten":
            stored[name] = array.reshape(-1, 1)
        elif change == "rename":
            stored[name + data.draw(st.sampled_from(["2", ".bias", "_scale"]))] = array
        elif change == "integers":
            stored[name] = array.astype(np.int8)
    path = write_folder(tmp_path_factory.mktemp("fuzz"), flat_values(PLAIN), stored)
    try:
        open_drafter(path)
    except EagleJaxError as error:
        assert str(path) in str(error)
    else:
        assert set(stored) in (set(PLAIN_STORED), set(PLAIN_STORED) - {"t2d"})


def test_a_configuration_that_is_not_an_object(tmp_path):
    path = plain_folder(tmp_path)
    for content in ("[]", "{", '{"a": 1, "a": 2}', "\x00"):
        (path / "config.json").write_text(content)
        refuse(path, "config.json")
    (path / "config.json").unlink()
    refuse(path, "config.json", "No such file")
