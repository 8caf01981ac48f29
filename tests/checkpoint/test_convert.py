"""convert, inspect and diff: what they report."""

import dataclasses
import json

import numpy as np
import pytest
from drafter_folders import SHARED_DRAFTERS, drafter_config, flat_values, random_arrays, stored_arrays, write_folder

from eagle_jax.checkpoint.convert import convert, diff, inspect
from eagle_jax.checkpoint.drafter_checkpoint import DrafterCheckpoint, open_drafter
from eagle_jax.checkpoint.export import export_drafter
from eagle_jax.checkpoint.layouts import WRITABLE
from eagle_jax.errors import CheckpointError, ConfigError

CONFIG = drafter_config()
ARRAYS = random_arrays(CONFIG)


def save(folder, config=CONFIG, arrays=ARRAYS, layout="vllm"):
    export_drafter(DrafterCheckpoint.from_arrays(config, arrays), folder, layout)
    return folder


@pytest.mark.parametrize("layout", WRITABLE)
def test_convert_reports_and_keeps_everything(tmp_path, layout):
    source = save(tmp_path / "source")
    report = convert(source, tmp_path / "out", layout)
    assert (report.source_layout, report.layout, report.dtype) == ("vllm", layout, None)
    assert report.tensors == len(ARRAYS)
    assert report.parameters == sum(a.size for path, a in ARRAYS.items() if path != "draft_to_target")
    result = diff(source, tmp_path / "out")
    assert result.equal and result.config == {} and {t.status for t in result.tensors} == {"equal"}
    for record in (report, result, inspect(tmp_path / "out")):
        json.dumps(record.to_json(), allow_nan=False)


def test_a_chain_of_conversions_ends_where_it_began(tmp_path):
    here = save(tmp_path / "0")
    for i, layout in enumerate(["safeailab", "speculators", "orbax", "sglang", "vllm"], 1):
        convert(here, tmp_path / str(i), layout)
        here = tmp_path / str(i)
    assert diff(tmp_path / "0", here).equal
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "0" / name).read_bytes() == (here / name).read_bytes()


def test_options(tmp_path):
    values = flat_values(CONFIG, architectures=["LlamaForCausalLMEagle3"], fc_norm=True, norm_output=True)
    source = write_folder(tmp_path / "specforge", values, stored_arrays(CONFIG, ARRAYS))
    report = convert(source, tmp_path / "a", "vllm", capture_layers=(1, 2, 3))
    assert open_drafter(tmp_path / "a").config == dataclasses.replace(CONFIG, capture_layers=(1, 2, 3))
    assert any("norm_output" in warning for warning in report.warnings)
    report = convert(
        source, tmp_path / "b", "speculators", norm_output_meaning="specforge", target="org/model", dtype="float16"
    )
    values = json.loads((tmp_path / "b/config.json").read_text())
    assert values["norm_output"] is False and values["torch_dtype"] == "float16"
    assert values["speculators_config"]["verifier"]["name_or_path"] == "org/model"
    for ids, message in (((1, 2), "names 2 layers"), ((3, 2, 5), "must ascend"), ((-1, 2, 5), "must ascend")):
        with pytest.raises(ConfigError, match=message):
            convert(source, tmp_path / "c", "vllm", source_layout="torchspec", capture_layers=ids)
    assert not (tmp_path / "c").exists()


def test_safeailab_readers_ignore_the_switches(tmp_path):
    report = convert(save(tmp_path / "s"), tmp_path / "out", "safeailab")
    assert "ignores fc_norm, norm_output, head_dim, the captured layers" in report.warnings[0]


def test_inspect(tmp_path):
    report = inspect(save(tmp_path / "s", layout="sglang"))
    assert (report.layout, report.kind) == ("sglang", "eagle3.1")
    assert "midlayer" in report.detected_by and report.layout_title == "SpecForge / SGLang"
    assert (report.captured_inputs, report.captured_outputs) == ([2, 3, 5], [1, 2, 4])
    assert report.config["fc_norm"] and report.config["block"]["hidden_size"] == 16
    tensors = {tensor.path: tensor for tensor in report.tensors}
    assert tensors["fc.kernel"].shape == [48, 16] and tensors["fc.kernel"].stored == ["fc.weight"]
    assert tensors["fc_norm.scale"].stored == [f"fc_norm.{i}.weight" for i in range(3)]
    assert tensors["draft_to_target"].dtype == "int32" and tensors["draft_to_target"].stored == ["d2t"]
    assert report.bytes == sum(array.nbytes for array in ARRAYS.values())
    for changes, kind in (
        ({"norm_output": False}, "eagle3 with fc_norm"),
        ({"fc_norm": False}, "eagle3 with norm_output"),
        ({"fc_norm": False, "norm_output": False}, "eagle3"),
    ):
        config = drafter_config(**changes)
        assert inspect(save(tmp_path / kind, config, random_arrays(config))).kind == kind
    config = drafter_config(capture_layers=(0, 3, 5))
    assert inspect(save(tmp_path / "zero", config, random_arrays(config))).captured_outputs is None


def test_inspect_reads_every_weight(tmp_path):
    stored = stored_arrays(CONFIG, ARRAYS)
    stored["norm.weight"] = np.full(16, np.nan, np.float32)
    source = write_folder(tmp_path, flat_values(CONFIG, fc_norm=True), stored)
    with pytest.raises(CheckpointError, match=r"NaN or infinite weights in norm.weight"):
        inspect(source)


def test_diff(tmp_path):
    a = save(tmp_path / "a")
    changed = ARRAYS | {"norm.scale": ARRAYS["norm.scale"] + np.float32(0.5)}
    changed["fc.kernel"] = ARRAYS["fc.kernel"].astype(np.float16).astype(np.float32)
    result = diff(a, save(tmp_path / "b", arrays=changed))
    by_path = {tensor.path: tensor for tensor in result.tensors}
    assert not result.equal and by_path["norm.scale"].status == "different"
    assert by_path["norm.scale"].max_abs == pytest.approx(0.5, abs=1e-6)
    assert by_path["lm_head.weight"].status == "equal"

    convert(tmp_path / "b", tmp_path / "c", "sglang", dtype="float16")
    kept = {tensor.path: tensor for tensor in diff(tmp_path / "b", tmp_path / "c").tensors}["fc.kernel"]
    assert (kept.status, kept.max_abs, kept.detail) == ("dtype", 0.0, "float32 and float16")

    other = drafter_config(fc_norm=False, draft_vocab_size=7, block={"mlp_size": 24})
    result = diff(a, save(tmp_path / "d", other, random_arrays(other)))
    by_path = {tensor.path: tensor for tensor in result.tensors}
    assert by_path["fc_norm.scale"].status == "only_in_a"
    assert (by_path["lm_head.weight"].status, by_path["lm_head.weight"].detail) == ("shape", "[8, 16] and [7, 16]")
    assert result.config == {
        "fc_norm": [True, False],
        "draft_vocab_size": [8, 7],
        "block.mlp_size": [20, 24],
    }
    assert {t.status for t in diff(tmp_path / "d", a).tensors if t.path == "fc_norm.scale"} == {"only_in_b"}
    json.dumps(result.to_json(), allow_nan=False)


@pytest.mark.skipif(not SHARED_DRAFTERS.is_dir(), reason="no drafters beside the checkout")
def test_the_real_drafters(tmp_path):
    three, one = SHARED_DRAFTERS / "smollm2-135m-eagle3", SHARED_DRAFTERS / "smollm2-135m-eagle3.1"
    for source, kind in ((three, "eagle3"), (one, "eagle3.1")):
        report = inspect(source)
        assert (report.kind, report.captured_outputs, report.warnings) == (kind, [1, 14, 26], [])
        for layout in WRITABLE:
            convert(source, tmp_path / kind / layout, layout)
            assert diff(source, tmp_path / kind / layout).equal
    result = diff(three, one)
    assert result.config == {"fc_norm": [False, True], "norm_output": [False, True]}
