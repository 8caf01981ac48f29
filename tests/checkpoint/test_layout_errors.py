"""Drafters that must not load, each refused by name; and reported mistakes of other loaders, with the right value."""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest
from drafter_folders import drafter_config, flat_values, random_arrays, stored_arrays, write_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from eagle_jax.checkpoint.drafter_checkpoint import DrafterCheckpoint, open_drafter
from eagle_jax.checkpoint.export import export_drafter
from eagle_jax.checkpoint.layouts import WRITABLE, detect
from eagle_jax.errors import CheckpointError, ConfigError, EagleJaxError

CONFIG = drafter_config(fc_norm=False, norm_output=False)
ARRAYS = random_arrays(CONFIG, 3)
STORED = stored_arrays(CONFIG, ARRAYS)
IDS = {"eagle_aux_hidden_state_layer_ids": [2, 3, 5]}
SERVED = {"architectures": ["LlamaForCausalLMEagle3"]}


def folder(tmp_path, changes=None, tensors=None, drop=()):
    """A good folder with these keys changed, tensors changed or added, and tensors dropped."""
    stored = {name: array for name, array in (STORED | (tensors or {})).items() if name not in drop}
    return write_folder(tmp_path / "drafter", flat_values(CONFIG, **(IDS | SERVED | (changes or {}))), stored)


def refuse(path, *words, error=EagleJaxError, **options):
    with pytest.raises(error) as caught:
        open_drafter(path, **options)
    message = str(caught.value)
    assert "\n" not in message and str(path) in message
    for word in words:
        assert word in message, message


def test_the_folder_itself_is_good(tmp_path):
    assert open_drafter(folder(tmp_path)).config == CONFIG


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
    refuse(folder(tmp_path, changes, tensors), *words)


def test_eagle_1_head(tmp_path):
    """fc reads the embedding and one state; there is no hidden_norm."""
    stored = {
        "fc.weight": np.ones((16, 32), np.float32),
        "fc.bias": np.ones(16, np.float32),
        "layers.0.self_attn.q_proj.weight": np.ones((24, 16), np.float32),
        "layers.0.post_attention_layernorm.weight": np.ones(16, np.float32),
        "embed_tokens.weight": np.ones((24, 16), np.float32),
    }
    refuse(write_folder(tmp_path, flat_values(CONFIG), stored), "EAGLE-1 or EAGLE-2")


def test_quantised_export_of_modelopt(tmp_path):
    path = folder(tmp_path)
    (path / "hf_quant_config.json").write_text("{}")
    refuse(path, "hf_quant_config.json")


def test_peagle_of_speculators(tmp_path):
    export_drafter(DrafterCheckpoint.from_arrays(CONFIG, ARRAYS), tmp_path / "s", "speculators")
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
        open_drafter(folder(tmp_path), layout="medusa")


# Tensors (B02, B03, B04, B08, B09, B11)


@pytest.mark.parametrize("name", sorted(STORED))
def test_every_tensor_is_needed(tmp_path, name):
    if name == "t2d":  # no server reads it, Model-Optimizer never writes it
        assert open_drafter(folder(tmp_path, drop=[name])).config == CONFIG
        return
    refuse(folder(tmp_path, drop=[name]), {"lm_head.weight": "lm_head"}.get(name, name))


def test_a_stray_tensor_or_a_wrong_shape(tmp_path):
    refuse(folder(tmp_path, tensors={"midlayer.extra.weight": np.ones(2)}), "unknown: midlayer.extra.weight")
    wrong = {"midlayer.mlp.up_proj.weight": np.ones((16, 20), np.float32)}
    refuse(folder(tmp_path, tensors=wrong), "midlayer.mlp.up_proj.weight is [16, 20]", "wants [20, 16]")
    refuse(folder(tmp_path, tensors={"norm.weight": np.ones(16, np.int32)}), "norm.weight is int32")
    refuse(folder(tmp_path, {"num_hidden_layers": 10**9}), "num_hidden_layers", "holds 1 blocks")
    refuse(folder(tmp_path, {"num_aux_hidden_states": 10**9, **IDS}), "fc.weight is [16, 48]")


def test_the_feature_width_is_the_fan_in_of_fc(tmp_path):
    """B11: three states of width 16 are 48; a drafter for another target never passes."""
    refuse(folder(tmp_path, {"target_hidden_size": 20}), "fc.weight is [16, 48]", "want [16, 60]")
    refuse(folder(tmp_path, {"eagle_aux_hidden_state_layer_ids": [2, 3]}), "2 captured states", "want [16, 32]")


def test_a_missing_head_is_only_borrowed_at_full_vocabulary(tmp_path):
    """B02."""
    refuse(folder(tmp_path, drop=["lm_head.weight"]), "needs the drafter's own lm_head")
    full = folder(tmp_path, {"draft_vocab_size": 24}, drop=["lm_head.weight", "d2t", "t2d"])
    assert open_drafter(full).config.own_head is False
    borrowed = drafter_config(draft_vocab_size=24, own_head=False)
    written = DrafterCheckpoint.from_arrays(borrowed, random_arrays(borrowed))
    export_drafter(written, tmp_path / "sglang", "sglang")
    # SGLang borrows the head when the size is null, and leaves it random when a size is given.
    assert json.loads((tmp_path / "sglang/config.json").read_text())["draft_vocab_size"] is None


@pytest.mark.parametrize("layout", WRITABLE)
def test_own_tables_win_and_are_never_invented(tmp_path, layout):
    """B01, B03: what the file carries is used bit for bit, and nothing else is exported."""
    own = dataclasses.replace(CONFIG, own_embedding=True)
    arrays = random_arrays(own, 4)
    export_drafter(DrafterCheckpoint.from_arrays(own, arrays), tmp_path / "own", layout)
    np.testing.assert_array_equal(open_drafter(tmp_path / "own").read("embed.weight"), arrays["embed.weight"])
    export_drafter(DrafterCheckpoint.from_arrays(CONFIG, ARRAYS), tmp_path / "shared", layout)
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
    assert open_drafter(folder(tmp_path, tensors={"fc.bias": np.ones(16, np.float32)})).config.fc_bias
    refuse(folder(tmp_path, {"bias": True}), "bias: True, but the file lacks fc.bias")
    refuse(folder(tmp_path, {"attention_bias": True}), "attention_bias: True, but the file lacks the biases")
    biases = {f"midlayer.self_attn.{n}_proj.bias": np.ones(s, np.float32) for n, s in (("q", 24), ("k", 12), ("v", 12))}
    block = open_drafter(folder(tmp_path, tensors=biases)).config.block
    assert (block.qkv_bias, block.o_bias) == (True, False)
    refuse(folder(tmp_path, {"attention_bias": False}, biases), "attention_bias: False, but the file holds the biases")


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_weights_name_the_tensor(tmp_path, dtype, value):
    arrays = {path: a if path == "draft_to_target" else a.astype(dtype) for path, a in ARRAYS.items()}
    arrays["layers.0.mlp.up_proj.kernel"][3, 2] = value
    found = open_drafter(write_folder(tmp_path, flat_values(CONFIG), stored_arrays(CONFIG, arrays)))
    with pytest.raises(CheckpointError, match=r"NaN or infinite weights in midlayer.mlp.up_proj.weight"):
        found.read("layers.0.mlp.up_proj.kernel")
    found.read("norm.scale")


# The vocabulary tables (B13, B14)


def tables(ids, vocab=24):
    ids = np.asarray(ids, np.int64)
    return {"d2t": ids - np.arange(len(ids)), "t2d": np.isin(np.arange(vocab), ids)}


def test_offsets_become_ids_and_stay_integers(tmp_path):
    """B14: targets [0, 5, 9] are d2t [0, 4, 7]."""
    config = dataclasses.replace(CONFIG, draft_vocab_size=3, vocab_size=130000)
    arrays = random_arrays(config) | {"draft_to_target": np.array([0, 5, 128009], np.int32)}
    path = write_folder(tmp_path, flat_values(config), stored_arrays(config, arrays))
    np.testing.assert_array_equal(load_file(path / "model.safetensors")["d2t"], [0, 4, 128007])
    ids = open_drafter(path).read("draft_to_target")
    assert ids.dtype == np.int32 and ids.tolist() == [0, 5, 128009]
    export_drafter(open_drafter(path), tmp_path / "bf16", "vllm", dtype="bfloat16")
    assert open_drafter(tmp_path / "bf16").read("draft_to_target").tolist() == [0, 5, 128009]


GOOD = [1, 3, 5, 8, 13, 20, 21, 23]


@pytest.mark.parametrize(
    ("d2t", "words"),
    [
        (np.arange(8, dtype=np.float32), ["must hold integers", "float32"]),
        (tables(GOOD)["d2t"].astype(ml_dtypes.bfloat16).astype(np.float16), ["must hold integers"]),
        (tables(GOOD)["d2t"][:7], ["shape [7]", "[8]"]),
        (tables([1, 3, 5, 8, 13, 20, 21, 24])["d2t"], ["draft id 7 maps to target id 24, outside [0, 24)"]),
        (tables([-1, 3, 5, 8, 13, 20, 21, 23])["d2t"], ["draft id 0 maps to target id -1"]),
        (tables([1, 3, 3, 8, 13, 20, 21, 23])["d2t"], ["draft ids 1 and 2 map to 3 and 3"]),
        (tables([3, 1, 5, 8, 13, 20, 21, 23])["d2t"], ["ascend strictly"]),
        (np.array(GOOD), ["looks like absolute ids", "offsets"]),
        (np.full(8, 2**63 - 1), ["outside [0, 24)"]),
        (np.full(8, 2**64 - 1, np.uint64), ["outside [0, 24)"]),
    ],
)
def test_tables_that_name_wrong_tokens(tmp_path, d2t, words):
    refuse(folder(tmp_path, tensors={"d2t": d2t}, drop=["t2d"]), "d2t", *words)


def test_tables_that_disagree(tmp_path):
    good = tables(GOOD)
    assert open_drafter(folder(tmp_path, tensors=good)).read("draft_to_target").tolist() == GOOD
    other = good["t2d"].copy()
    other[[1, 2]] = False, True
    refuse(folder(tmp_path, tensors=good | {"t2d": other}), "t2d", "disagrees with d2t about 2 target ids (first: 1)")
    refuse(folder(tmp_path, tensors=good | {"t2d": other[:20]}), "t2d", "expected bool [24]")


def test_full_vocabulary_tables(tmp_path):
    """B13, B14: none, or zeros and ones; an identity written as 0, 1, 2 names wrong tokens."""
    full = {"lm_head.weight": np.ones((24, 16), np.float32)}
    changes = {"draft_vocab_size": 24}
    assert open_drafter(folder(tmp_path, changes, full, drop=["d2t", "t2d"])).config.full_vocabulary
    trivial = {"d2t": np.zeros(24, np.int64), "t2d": np.ones(24, np.bool_)}
    found = open_drafter(folder(tmp_path, changes, full | trivial))
    assert "draft_to_target" not in found.keys()  # noqa: SIM118 (not a dict)
    refuse(folder(tmp_path, changes, full | trivial | {"d2t": np.arange(24)}), "d2t", "the identity written as 0, 1, 2")
    refuse(folder(tmp_path, changes, full | trivial | {"t2d": np.zeros(24, np.bool_)}), "t2d", "24 target ids")
    refuse(folder(tmp_path, drop=["d2t"]), "d2t is missing", "(8)", "(24)")


def test_safeailab_must_say_its_draft_vocabulary(tmp_path):
    changes = {"draft_vocab_size": None, "architectures": None}
    refuse(folder(tmp_path, changes), "draft_vocab_size: missing")


# Captured layers (B19, B20, B23)


def test_numberings(tmp_path):
    top, nested = IDS, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}}
    none = {"eagle_aux_hidden_state_layer_ids": None}
    assert open_drafter(folder(tmp_path, top | nested)).warnings == []
    found = open_drafter(folder(tmp_path, none | nested))
    assert found.config.capture_layers == (2, 3, 5)
    assert "[1, 2, 4] counted as block outputs = [2, 3, 5] counted as block inputs" in found.warnings[0]
    wrong = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 5]}}
    refuse(folder(tmp_path, top | wrong), "name different layers", "must be [1, 2, 4]")
    found = open_drafter(folder(tmp_path, none))
    assert found.config.capture_layers is None and len(found.warnings) == 1
    assert "names no captured layers" in found.warnings[0]
    # The state after the last block is a boundary like any other.
    last = {"eagle_aux_hidden_state_layer_ids": [24, 30, 36]}
    assert open_drafter(folder(tmp_path, last)).config.capture_layers == (24, 30, 36)


@pytest.mark.parametrize("ids", [[3, 2, 5], [2, 2, 5], [-1, 2, 5], [2.0, 3, 5], ["2", 3, 5], [True, 3, 5]])
def test_ids_that_cannot_be_layers(tmp_path, ids):
    refuse(folder(tmp_path, {"eagle_aux_hidden_state_layer_ids": ids}), "eagle_aux_hidden_state_layer_ids")


def test_the_embeddings_have_no_output_number(tmp_path):
    config = drafter_config(capture_layers=(0, 3, 5))
    drafter = DrafterCheckpoint.from_arrays(config, random_arrays(config))
    with pytest.raises(ConfigError, match=r"boundary 0 \(the embeddings\) is the output of no block"):
        export_drafter(drafter, tmp_path / "sglang", "sglang")
    export_drafter(drafter, tmp_path / "vllm", "vllm")
    values = json.loads((tmp_path / "vllm/config.json").read_text())
    assert values["eagle_aux_hidden_state_layer_ids"] == [0, 3, 5]
    assert "eagle_aux_hidden_state_layer_ids" not in values["eagle_config"]


# Switches (B29, B30, B31, B33)


def test_absent_switches_are_false(tmp_path):
    """B33, and B29 for plain files."""
    flags = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")
    explicit = open_drafter(folder(tmp_path, dict.fromkeys(flags, False)))
    absent = open_drafter(folder(tmp_path))
    assert absent.config == explicit.config and not any(getattr(absent.config, flag) for flag in flags)


def test_norm_before_residual_of_speculators(tmp_path):
    """B29: absent is true there, as vLLM reads it, and said aloud."""
    export_drafter(DrafterCheckpoint.from_arrays(CONFIG, ARRAYS), tmp_path / "s", "speculators")
    path = tmp_path / "s/config.json"
    values = json.loads(path.read_text())
    assert values["norm_before_residual"] is False and open_drafter(tmp_path / "s").warnings == []
    del values["norm_before_residual"]
    path.write_text(json.dumps(values))
    found = open_drafter(tmp_path / "s")
    assert found.config.norm_before_residual and "read as true" in found.warnings[0]


def test_norms_that_the_switches_deny(tmp_path):
    """B30, B31."""
    refuse(folder(tmp_path, tensors={"input_norm.weight": np.ones(48, np.float32)}), "norm_before_fc: false or absent")
    three = {f"fc_norm.{i}.weight": np.full(16, i, np.float32) for i in range(3)}
    refuse(folder(tmp_path, tensors=three), "fc_norm: false or absent")
    refuse(folder(tmp_path, {"fc_norm": True}), "missing: fc_norm.0.weight")
    found = open_drafter(folder(tmp_path, {"fc_norm": True}, three))
    np.testing.assert_array_equal(found.read("fc_norm.scale"), np.repeat([[0], [1], [2]], 16, 1))
    np.testing.assert_array_equal(found.read("fc_norm.scale", (slice(1, 2), slice(0, 3))), [[1, 1, 1]])
    mixed = three | {"fc_norm.1.weight": np.ones(16, np.float16)}
    refuse(folder(tmp_path, {"fc_norm": True}, mixed), "fc_norm.0.weight, fc_norm.1.weight", "must have one dtype")
    both = {"fc_norm": True, "norm_before_fc": True}
    refuse(folder(tmp_path, both, three | {"input_norm.weight": np.ones(48, np.float32)}), "exclude each other")
    nested = {"norm_before_fc": False, "eagle_config": {"norm_before_fc": True}}  # the nested value wins in vLLM
    assert open_drafter(folder(tmp_path, nested, {"input_norm.weight": np.ones(48, np.float32)})).config.norm_before_fc


# Rotary and geometry (B37, B39, B40)


def test_rotary_forms(tmp_path):
    """B40: the type field decides, not the presence of an object; B37 is the round trip of test_layouts."""
    plain = open_drafter(folder(tmp_path, {"rope_theta": 5e5})).config.block.rotary
    for form in (
        {"rope_type": "default"},
        {"type": "default", "factor": 1.0},
        {"rope_type": "default", "rope_theta": 5e5},
    ):
        found = open_drafter(folder(tmp_path, {"rope_theta": 5e5, "rope_parameters": form}))
        assert found.config.block.rotary == plain
    refuse(folder(tmp_path, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}), "missing")
    two = {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"type": "linear", "factor": 4.0}}
    refuse(folder(tmp_path, two), "differs from rope_parameters")
    refuse(folder(tmp_path, {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}), "rope_theta")


def test_an_explicit_head_dim_wins(tmp_path):
    """B39: hidden 20, 4 heads, 2 kv heads, head_dim 8: q 40 -> 32, k and v 40 -> 16, o 32 -> 20."""
    config = drafter_config(block={"hidden_size": 20, "head_dim": 8}, target_hidden_size=20)
    path = write_folder(
        tmp_path, flat_values(config, fc_norm=True), stored_arrays(config, random_arrays(config), layer="layers.0.")
    )
    found = open_drafter(path)
    shapes = [found.info(f"layers.0.self_attn.{name}_proj.kernel").shape for name in "qkvo"]
    assert shapes == [(40, 32), (40, 16), (40, 16), (32, 20)]


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"sliding_window": 4, "layer_types": ["sliding_attention"]}, 4),
        ({"sliding_window": 4, "layer_types": ["full_attention"]}, None),
        ({"sliding_window": 4, "use_sliding_window": False, "max_window_layers": 28}, None),
        ({"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 28}, None),
        ({"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 0}, 4),
    ],
)
def test_sliding_windows(tmp_path, changes, window):
    assert open_drafter(folder(tmp_path, changes)).config.block.sliding_window == window


def test_windows_that_leave_a_question(tmp_path):
    refuse(folder(tmp_path, {"sliding_window": 4}), "sliding_window", "does not say which layers")
    refuse(folder(tmp_path, {"layer_types": ["sliding_attention"]}), "sliding_window: missing")
    refuse(folder(tmp_path, {"layer_types": ["full_attention"] * 2}), "names 2 layers, the drafter has 1")
    refuse(folder(tmp_path, {"layer_types": ["chunked_attention"]}), "layer_types")


def test_later_blocks_whose_norms_differ(tmp_path):
    config = drafter_config(num_layers=2)
    stored = stored_arrays(config, random_arrays(config), layer="layers.0.")
    stored["layers.1.hidden_norm.weight"] = stored["layers.1.input_layernorm.weight"] + 1
    path = write_folder(tmp_path, flat_values(config, fc_norm=True, norm_output=True), stored)
    refuse(path, "layers.1.hidden_norm.weight differs from layers.1.input_layernorm.weight")


# Fuzz

JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)
KEYS = [
    *sorted(flat_values(CONFIG)),
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
    path = write_folder(tmp_path_factory.mktemp("fuzz"), flat_values(CONFIG) | changes, STORED)
    try:
        found = open_drafter(path)
    except EagleJaxError as error:
        assert str(path) in str(error)
    else:
        assert found.read("fc.kernel").shape == (48, 16)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_fuzzed_tensors(tmp_path_factory, data):
    stored = dict(STORED)
    for name in data.draw(st.lists(st.sampled_from(sorted(STORED)), min_size=1, max_size=3, unique=True)):
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
    path = write_folder(tmp_path_factory.mktemp("fuzz"), flat_values(CONFIG), stored)
    try:
        open_drafter(path)
    except EagleJaxError as error:
        assert str(path) in str(error)
    else:
        assert set(stored) in (set(STORED), set(STORED) - {"t2d"})


def test_a_configuration_that_is_not_an_object(tmp_path):
    path = folder(tmp_path)
    for content in ("[]", "{", '{"a": 1, "a": 2}', "\x00"):
        (path / "config.json").write_text(content)
        refuse(path, "config.json")
    (path / "config.json").unlink()
    refuse(path, "config.json", "No such file")
