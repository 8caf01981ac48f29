"""Targets from folders: every layout gives the same parameters, everything else is one clear error."""

import json
import logging
import re

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from hf_folder import CONFIG, weights, write_file, write_folder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from tiny_gguf import write_gguf

from eagle_jax.checkpoint import place
from eagle_jax.checkpoint.load import load_target, read_target
from eagle_jax.checkpoint.source import MemorySource
from eagle_jax.errors import CheckpointError, ConfigError, EagleJaxError, InputError
from eagle_jax.layers import cache
from eagle_jax.sharding import Placement, make_mesh

TIED = CONFIG | {"tie_word_embeddings": True}
HEAD, EMBED = "lm_head.weight", "model.embed_tokens.weight"


def parameters(target):
    return {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(target.model))}


def as_stored(target):
    """HF name -> array, by hand and not by the table under test."""
    found = {}
    for path, value in parameters(target).items():
        name = path.replace("kernel", "weight").replace("scale", "weight").replace("embed.", "embed_tokens.")
        if not path.startswith("layers."):
            found[name if path.startswith("lm_head") else f"model.{name}"] = np.asarray(value)
            continue
        for i, layer in enumerate(np.asarray(value)):
            found[f"model.layers.{i}.{name[7:]}"] = layer.T if path.endswith("kernel") else layer
    return found


def assert_same(target, tensors):
    found = as_stored(target)
    assert sorted(found) == sorted(tensors)
    for name, value in tensors.items():
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize(
    ("family", "shards", "dtype"),
    [
        ("llama", 1, np.float32),
        ("llama", 3, ml_dtypes.bfloat16),
        ("qwen2", 1, ml_dtypes.bfloat16),
        ("qwen2", 3, np.float16),
        ("qwen3", 3, np.float32),
        ("qwen3", 1, np.float16),
    ],
)
def test_every_parameter_bit_for_bit(tmp_path, family, shards, dtype):
    config = CONFIG | {"model_type": family}
    tensors = weights(config, dtype=dtype)
    write_folder(tmp_path, tensors, config, shards)
    target = load_target(tmp_path)
    assert_same(target, tensors)
    assert (target.config.family, target.path) == (family, tmp_path)


def test_the_loaded_model_runs(tmp_path):
    write_folder(tmp_path, weights())
    target = load_target(tmp_path)
    kv = cache.init(3, 1, 2, 16, 8, jnp.float32)
    out = target.model(jnp.array([[1, 5, 9]]), jnp.arange(3)[None], kv, jnp.zeros(1, jnp.int32), capture=(0, 3))
    assert out.logits.shape == (1, 3, 64) and bool(jnp.isfinite(out.logits).all())


@pytest.mark.parametrize(
    ("prefix", "head"),
    [
        ("model.", "lm_head.weight"),
        ("language_model.model.", "language_model.lm_head.weight"),
        ("model.language_model.", "lm_head.weight"),
        ("", "lm_head.weight"),
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_known_prefixes_give_the_same_model(tmp_path, caplog, prefix, head, tied):
    config = CONFIG | {"tie_word_embeddings": tied}
    tensors = weights(config, prefix=prefix, head=head)
    write_folder(tmp_path, tensors, config)
    with caplog.at_level(logging.INFO, logger="eagle_jax"):
        target = load_target(tmp_path)
    assert_same(target, weights(config))
    assert (repr(prefix) in caplog.text) == (prefix != "model.")


def test_unknown_prefix_lists_what_is_there(tmp_path):
    write_folder(tmp_path, weights(prefix="transformer."))
    with pytest.raises(CheckpointError, match=r"no embedding table.*transformer\.embed_tokens\.weight"):
        load_target(tmp_path)


def test_a_multimodal_wrapper(tmp_path):
    tensors = weights(TIED, prefix="model.language_model.")
    tensors |= {"model.visual.patch.weight": np.ones((2, 2), np.float32)}
    text = {key: value for key, value in CONFIG.items() if key not in ("tie_word_embeddings", "eos_token_id")}
    wrapper = {"model_type": "some_vl", "text_config": text, "vision_config": {}, "tie_word_embeddings": True}
    write_folder(tmp_path, tensors, wrapper | {"eos_token_id": [2, 7]})
    target = load_target(tmp_path)
    assert_same(target, weights(TIED))
    assert target.config.eos_token_ids == (2, 7)
    # Inside the text model the reader stays strict.
    write_folder(tmp_path, tensors | {"model.language_model.extra": np.ones(2, np.float32)}, wrapper)
    with pytest.raises(CheckpointError, match=r"unknown: model\.language_model\.extra"):
        load_target(tmp_path)


def test_wrapper_config_must_be_an_object(tmp_path):
    write_folder(tmp_path, weights(), {"text_config": "llama"})
    with pytest.raises(ConfigError, match=r"config\.json: text_config"):
        load_target(tmp_path)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, "float32", np.dtype(np.float16)])
def test_a_dtype_that_is_asked_for(tmp_path, dtype):
    tensors = weights()
    write_folder(tmp_path, tensors)
    assert_same(load_target(tmp_path, dtype=dtype), {n: t.astype(jnp.dtype(dtype)) for n, t in tensors.items()})


def test_mixed_files_are_read_in_their_most_common_dtype(tmp_path):
    tensors = weights(dtype=ml_dtypes.bfloat16)
    mixed = {n: t.astype(np.float32) if "norm" in n else t for n, t in tensors.items()}
    write_folder(tmp_path, mixed)
    assert_same(load_target(tmp_path), tensors)


def test_a_tied_head_may_be_repeated_but_not_contradicted(tmp_path):
    tensors = weights(TIED)
    write_folder(tmp_path, tensors | {HEAD: tensors[EMBED]}, TIED)
    assert load_target(tmp_path).model.lm_head is None
    other = tensors[EMBED].copy()
    other[-1, -1] += 1
    for head in (other, tensors[EMBED][:-1]):
        write_folder(tmp_path, tensors | {HEAD: head}, TIED)
        with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
            load_target(tmp_path)


def test_stored_rotary_buffers_are_ignored_and_nothing_else(tmp_path):
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    write_folder(tmp_path, weights() | buffer)
    load_target(tmp_path)
    write_folder(tmp_path, weights() | {"model.layers.0.self_attn.bias": np.ones(4, np.float32)})
    with pytest.raises(CheckpointError, match=r"unknown: model\.layers\.0\.self_attn\.bias"):
        load_target(tmp_path)


@pytest.mark.parametrize(
    ("content", "expected"), [({"eos_token_id": 9}, (9,)), ({"eos_token_id": [9, 2]}, (9, 2)), ({}, (2,))]
)
def test_generation_config_names_the_end_tokens(tmp_path, content, expected):
    write_folder(tmp_path, weights())
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    assert load_target(tmp_path).config.eos_token_ids == expected
    assert read_target(tmp_path).eos_token_ids == expected


@pytest.mark.parametrize("value", ["</s>", [], [1.5], True, -1])
def test_malformed_end_tokens(tmp_path, value):
    write_folder(tmp_path, weights())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id"):
        load_target(tmp_path)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_weights_that_are_not_finite_are_named(tmp_path, bad, dtype):
    tensors = weights(dtype=dtype)
    names = ["model.layers.1.mlp.up_proj.weight", EMBED]
    for name in names:
        tensors[name][3, 1] = bad
    write_folder(tmp_path, tensors)
    with pytest.raises(CheckpointError, match="NaN or infinite") as error:
        load_target(tmp_path)
    assert (
        all(name in str(error.value) for name in names) and "up_proj.weight, " not in str(error.value).split("in ")[0]
    )


def test_overflow_of_a_narrower_dtype_is_an_error(tmp_path):
    tensors = weights()
    tensors[EMBED][0, 0] = 1e30
    write_folder(tmp_path, tensors)
    with pytest.raises(CheckpointError, match=re.escape(EMBED)):
        load_target(tmp_path, dtype=jnp.float16)


def test_every_mismatch_is_reported_at_once(tmp_path):
    tensors = weights() | {"model.layers.3.mlp.up_proj.weight": np.ones((48, 32), np.float32)}
    tensors["model.layers.0.mlp.up_proj.weight"] = np.ones((32, 48), np.float32)
    tensors["model.norm.weight"] = np.ones(32, np.int8)
    del tensors[HEAD], tensors["model.layers.2.input_layernorm.weight"]
    write_folder(tmp_path, tensors)
    with pytest.raises(CheckpointError) as error:
        load_target(tmp_path)
    for part in (
        "missing: model.layers.2.input_layernorm.weight, lm_head.weight",
        "unknown: model.layers.3.mlp.up_proj.weight",
        "model.layers.0.mlp.up_proj.weight is [32, 48], the configuration wants [48, 32]",
        "model.norm.weight is int8",
    ):
        assert part in str(error.value)


def test_files_that_are_missing(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        load_target(tmp_path / "absent")
    with pytest.raises(CheckpointError, match=r"neither a config\.json nor a \.gguf"):
        load_target(tmp_path)
    write_folder(tmp_path, weights(), shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="missing shards: model-00002"):
        load_target(tmp_path)
    (tmp_path / "other").mkdir(exist_ok=True)
    write_file(tmp_path / "other" / "x.safetensors", weights())
    with pytest.raises(CheckpointError, match=r"other/config\.json: missing"):
        load_target(tmp_path / "other" / "x.safetensors")


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "intermediate_size", "head_dim", "num_hidden_layers"])
@pytest.mark.parametrize("value", [0, -8, 2**40, 10**30])
def test_sizes_that_nothing_has(tmp_path, key, value):
    write_folder(tmp_path, weights(), CONFIG | {key: value})
    with pytest.raises(EagleJaxError, match=re.escape(str(tmp_path))):
        load_target(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"model_type": "llama"}', '{"model_type": "mamba"}', '{"a": NaN}'])
def test_configurations_that_are_not(tmp_path, content):
    write_folder(tmp_path, weights())
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(EagleJaxError, match=r"config\.json"):
        load_target(tmp_path)


def test_a_folder_with_one_gguf_file(tmp_path):
    write_gguf(tmp_path / "a.gguf")
    assert load_target(tmp_path).path == tmp_path / "a.gguf"
    write_gguf(tmp_path / "b.gguf")
    with pytest.raises(CheckpointError, match=r"which of a\.gguf, b\.gguf"):
        load_target(tmp_path)


def test_the_tokenizer_is_read_when_asked_for(tmp_path):
    write_gguf(tmp_path / "a.gguf")
    target = load_target(tmp_path)
    assert target.tokenizer is target.tokenizer
    write_folder(tmp_path / "folder", weights())
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        _ = load_target(tmp_path / "folder").tokenizer


@pytest.mark.parametrize(("data", "tensor"), [(1, 2), (2, 4), (4, 2), (8, 1)])
def test_on_a_mesh_each_device_reads_its_part(tmp_path, data, tensor):
    tensors = weights()
    write_folder(tmp_path, tensors)
    target = load_target(tmp_path, placement=Placement(make_mesh(data, tensor)))
    assert_same(target, tensors)
    found = parameters(target)
    if tensor > 1:
        assert found["layers.mlp.up_proj.kernel"].sharding.spec == PartitionSpec(None, None, "tensor")
        assert found["lm_head.weight"].addressable_shards[0].data.shape == (64 // tensor, 32)


def test_slices_are_read_once_and_never_the_whole(tmp_path, monkeypatch):
    write_folder(tmp_path, weights())
    reads = []
    from eagle_jax.checkpoint import safetensors_file

    original = safetensors_file.SafetensorsFile.read

    def read(self, name, index=None):
        array = original(self, name, index)
        reads.append((name, array.shape))
        return array

    monkeypatch.setattr(safetensors_file.SafetensorsFile, "read", read)
    load_target(tmp_path, placement=Placement(make_mesh(2, 4)))
    up = [shape for name, shape in reads if name == "model.layers.1.mlp.up_proj.weight"]
    assert up == [(12, 32)] * 4  # four slices for eight devices
    assert [s for n, s in reads if n == "model.layers.1.mlp.down_proj.weight"] == [(32, 12)] * 4
    assert [s for n, s in reads if n == "model.norm.weight"] == [(32,)]


def test_a_mesh_that_does_not_divide_the_model(tmp_path):
    write_folder(tmp_path, weights())
    with pytest.raises(ConfigError, match="tensor=8 does not divide"):
        load_target(tmp_path, placement=Placement(make_mesh(1, 8)))


def test_one_tensor_is_read_at_a_time(tmp_path, monkeypatch):
    """No array of the host outlives the tensor after it."""
    import weakref

    write_folder(tmp_path, weights(dtype=np.float16))
    alive, most = [], 0
    original = place.jax.make_array_from_callback

    def counting(shape, sharding, fetch, **options):
        nonlocal most

        def fetching(index):
            array = fetch(index)
            alive.append(weakref.ref(array))
            return array

        most = max(most, sum(reference() is not None for reference in alive))
        return original(shape, sharding, fetching, **options)

    monkeypatch.setattr(place.jax, "make_array_from_callback", counting)
    load_target(tmp_path, dtype=jnp.float32)
    assert len(alive) > 20 and most <= 2


def test_the_stack_is_written_in_place():
    """The buffer of the stacked array is donated to every write."""
    stack = jnp.zeros((3, 4, 2))
    written, finite = place._writer(True, stack.sharding)(stack, jnp.ones((2, 4)), 1)
    assert stack.is_deleted() and bool(finite)
    np.testing.assert_array_equal(written[1], np.ones((4, 2)))
    np.testing.assert_array_equal(written[0], np.zeros((4, 2)))


def test_common_dtype_counts_elements():
    from eagle_jax.checkpoint.keymap import Piece

    source = MemorySource({"a": np.zeros(3, np.float32), "b": np.zeros(2, np.float16), "c": np.zeros(2, np.float16)})
    assert place.common_dtype(source, [Piece(n, source.info(n).shape, n, None, False) for n in "abc"]) == np.float16


@settings(max_examples=60, deadline=5000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_folders_give_our_errors(tmp_path, data):
    write_folder(tmp_path, weights(dtype=ml_dtypes.bfloat16), shards=2)
    victim = tmp_path / data.draw(st.sampled_from(sorted(p.name for p in tmp_path.iterdir() if p.is_file())))
    content = bytearray(victim.read_bytes())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content)))]
    else:
        where = data.draw(st.integers(0, len(content) - 1))
        content[where : where + 4] = data.draw(st.binary(min_size=1, max_size=4))
    victim.write_bytes(content)
    try:
        load_target(tmp_path)
    except EagleJaxError as error:
        assert str(error)
