"""Captured layers, switches, rotary and geometry as files state them, with the right value of each reported mistake."""

import json

import numpy as np
import pytest
from drafter_folders import (
    IDS,
    PLAIN,
    PLAIN_ARRAYS,
    drafter_config,
    flat_values,
    plain_folder,
    random_arrays,
    refuse,
    stored_arrays,
    write_folder,
)

from eagle_jax.checkpoint.drafter_checkpoint import DrafterCheckpoint, open_drafter
from eagle_jax.checkpoint.export import export_drafter
from eagle_jax.errors import ConfigError

# Captured layers (B19, B20, B23)


def test_numberings(tmp_path):
    top, nested = IDS, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}}
    none = {"eagle_aux_hidden_state_layer_ids": None}
    assert open_drafter(plain_folder(tmp_path, top | nested)).warnings == []
    found = open_drafter(plain_folder(tmp_path, none | nested))
    assert found.config.capture_layers == (2, 3, 5)
    assert "[1, 2, 4] counted as block outputs = [2, 3, 5] counted as block inputs" in found.warnings[0]
    wrong = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 5]}}
    refuse(plain_folder(tmp_path, top | wrong), "name different layers", "must be [1, 2, 4]")
    found = open_drafter(plain_folder(tmp_path, none))
    assert found.config.capture_layers is None and len(found.warnings) == 1
    assert "names no captured layers" in found.warnings[0]
    # The state after the last block is a boundary like any other.
    last = {"eagle_aux_hidden_state_layer_ids": [24, 30, 36]}
    assert open_drafter(plain_folder(tmp_path, last)).config.capture_layers == (24, 30, 36)


@pytest.mark.parametrize("ids", [[3, 2, 5], [2, 2, 5], [-1, 2, 5], [2.0, 3, 5], ["2", 3, 5], [True, 3, 5]])
def test_ids_that_cannot_be_layers(tmp_path, ids):
    refuse(plain_folder(tmp_path, {"eagle_aux_hidden_state_layer_ids": ids}), "eagle_aux_hidden_state_layer_ids")


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
    explicit = open_drafter(plain_folder(tmp_path, dict.fromkeys(flags, False)))
    absent = open_drafter(plain_folder(tmp_path))
    assert absent.config == explicit.config and not any(getattr(absent.config, flag) for flag in flags)


def test_norm_before_residual_of_speculators(tmp_path):
    """B29: absent is true there, as vLLM reads it, and said aloud."""
    export_drafter(DrafterCheckpoint.from_arrays(PLAIN, PLAIN_ARRAYS), tmp_path / "s", "speculators")
    path = tmp_path / "s/config.json"
    values = json.loads(path.read_text())
    assert values["norm_before_residual"] is False and open_drafter(tmp_path / "s").warnings == []
    del values["norm_before_residual"]
    path.write_text(json.dumps(values))
    found = open_drafter(tmp_path / "s")
    assert found.config.norm_before_residual and "read as true" in found.warnings[0]


def test_norms_that_the_switches_deny(tmp_path):
    """B30, B31."""
    refuse(
        plain_folder(tmp_path, tensors={"input_norm.weight": np.ones(48, np.float32)}),
        "norm_before_fc: false or absent",
    )
    three = {f"fc_norm.{i}.weight": np.full(16, i, np.float32) for i in range(3)}
    refuse(plain_folder(tmp_path, tensors=three), "fc_norm: false or absent")
    refuse(plain_folder(tmp_path, {"fc_norm": True}), "missing: fc_norm.0.weight")
    found = open_drafter(plain_folder(tmp_path, {"fc_norm": True}, three))
    np.testing.assert_array_equal(found.read("fc_norm.scale"), np.repeat([[0], [1], [2]], 16, 1))
    np.testing.assert_array_equal(found.read("fc_norm.scale", (slice(1, 2), slice(0, 3))), [[1, 1, 1]])
    mixed = three | {"fc_norm.1.weight": np.ones(16, np.float16)}
    refuse(
        plain_folder(tmp_path, {"fc_norm": True}, mixed), "fc_norm.0.weight, fc_norm.1.weight", "must have one dtype"
    )
    both = {"fc_norm": True, "norm_before_fc": True}
    refuse(plain_folder(tmp_path, both, three | {"input_norm.weight": np.ones(48, np.float32)}), "exclude each other")
    nested = {"norm_before_fc": False, "eagle_config": {"norm_before_fc": True}}  # the nested value wins in vLLM
    assert open_drafter(
        plain_folder(tmp_path, nested, {"input_norm.weight": np.ones(48, np.float32)})
    ).config.norm_before_fc


# Rotary and geometry (B37, B39, B40)


def test_rotary_forms(tmp_path):
    """B40: the type field decides, not the presence of an object; B37 is the round trip of test_layouts."""
    plain = open_drafter(plain_folder(tmp_path, {"rope_theta": 5e5})).config.block.rotary
    for form in (
        {"rope_type": "default"},
        {"type": "default", "factor": 1.0},
        {"rope_type": "default", "rope_theta": 5e5},
    ):
        found = open_drafter(plain_folder(tmp_path, {"rope_theta": 5e5, "rope_parameters": form}))
        assert found.config.block.rotary == plain
    refuse(plain_folder(tmp_path, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}), "missing")
    two = {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"type": "linear", "factor": 4.0}}
    refuse(plain_folder(tmp_path, two), "differs from rope_parameters")
    refuse(plain_folder(tmp_path, {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}), "rope_theta")


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
    assert open_drafter(plain_folder(tmp_path, changes)).config.block.sliding_window == window


def test_windows_that_leave_a_question(tmp_path):
    refuse(plain_folder(tmp_path, {"sliding_window": 4}), "sliding_window", "does not say which layers")
    refuse(plain_folder(tmp_path, {"layer_types": ["sliding_attention"]}), "sliding_window: missing")
    refuse(plain_folder(tmp_path, {"layer_types": ["full_attention"] * 2}), "names 2 layers, the drafter has 1")
    refuse(plain_folder(tmp_path, {"layer_types": ["chunked_attention"]}), "layer_types")


def test_later_blocks_whose_norms_differ(tmp_path):
    config = drafter_config(num_layers=2)
    stored = stored_arrays(config, random_arrays(config), layer="layers.0.")
    stored["layers.1.hidden_norm.weight"] = stored["layers.1.input_layernorm.weight"] + 1
    path = write_folder(tmp_path, flat_values(config, fc_norm=True, norm_output=True), stored)
    refuse(path, "layers.1.hidden_norm.weight differs from layers.1.input_layernorm.weight")
