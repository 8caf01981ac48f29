"""Rotary kinds against transformers' own functions and models, beyond the original length, in both config forms."""

import json

import hf_models
import jax.numpy as jnp
import numpy as np
import pytest
from hf_models import assert_close

from eagle_jax.config_reader import ConfigReader, read_rotary, write_rotary
from eagle_jax.errors import ConfigError
from eagle_jax.layers.rotary import inverse_frequencies, rotary_tables

ORIGINAL = 16
KINDS = {
    "default": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn_untruncated": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn_attention_factor": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "attention_factor": 1.3,
        "original_max_position_embeddings": ORIGINAL,
    },
    "yarn_mscale": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 40.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": ORIGINAL,
    },
}
# The lengths that released models use, at their own head_dim: (parameters, head_dim, max_position_embeddings).
RELEASED = {
    "llama31": (KINDS["llama3"] | {"original_max_position_embeddings": 8192}, 128, 131072),
    "llama32": (KINDS["llama3"] | {"factor": 32.0, "original_max_position_embeddings": 8192}, 64, 131072),
    "qwen3_yarn": (KINDS["yarn"] | {"rope_theta": 1e6, "original_max_position_embeddings": 32768}, 128, 131072),
    "gpt_oss_yarn": (KINDS["yarn_untruncated"] | {"original_max_position_embeddings": 4096}, 64, 131072),
}


def old_form(parameters: dict) -> dict:
    """`rope_parameters` as `rope_theta` and `rope_scaling`, with the type under its older name."""
    scaling = {key: value for key, value in parameters.items() if key not in ("rope_type", "rope_theta")}
    if parameters["rope_type"] == "default":
        return {"rope_theta": parameters["rope_theta"], "rope_scaling": None}
    return {"rope_theta": parameters["rope_theta"], "rope_scaling": {"type": parameters["rope_type"], **scaling}}


def read(fields: dict, max_position: int = 64):
    reader = ConfigReader(fields, "config.json")
    rotary = read_rotary(reader, None, max_position)
    reader.finish()
    return rotary


def check_tables(rotary, parameters: dict, head_dim: int, max_position: int, positions: np.ndarray) -> None:
    their_frequencies, their_factor, *theirs = hf_models.rotary_tables(parameters, head_dim, max_position, positions)
    frequencies, factor = inverse_frequencies(rotary, head_dim)
    np.testing.assert_allclose(frequencies, their_frequencies, rtol=1e-6)
    assert factor == pytest.approx(their_factor, rel=1e-7)
    # Both round frequencies and angles to float32, so two right answers part by some units in the angle's last place.
    room = factor * (1e-6 + 8e-7 * positions[:, None] * frequencies)
    for ours, expected in zip(rotary_tables(rotary, head_dim, jnp.asarray(positions)[None]), theirs, strict=True):
        assert (np.abs(ours[0] - expected) <= room).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["new", "old", "written"])
def test_tables_of_every_kind_in_every_form(kind, form):
    parameters = KINDS[kind]
    if form == "new":
        rotary = read({"rope_parameters": parameters})
    elif form == "old":
        rotary = read(old_form(parameters))
    else:
        base, scaling = write_rotary(read({"rope_parameters": parameters}))
        rotary = read({"rope_theta": base, "rope_scaling": scaling})
    check_tables(rotary, parameters, head_dim=8, max_position=64, positions=np.arange(4 * ORIGINAL))


@pytest.mark.parametrize("name", RELEASED)
def test_tables_of_released_models_far_out(name):
    parameters, head_dim, max_position = RELEASED[name]
    rotary = read({"rope_parameters": parameters}, max_position)
    check_tables(rotary, parameters, head_dim, max_position, np.array([0, 1, 4095, 4096, 8192, 32769, 100000, 131071]))


def test_type_decides_not_the_presence_of_an_object():
    """Newer files always carry `rope_parameters`, for the default kind too."""
    rotary = read({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}})
    assert (rotary.kind, rotary.base) == ("default", 1e6)
    assert read({"rope_theta": 1e6}) == rotary == read({"rope_theta": 1e6, "rope_scaling": None})


def test_unknown_kind_is_refused_by_name():
    with pytest.raises(ConfigError, match="foo"):
        read({"rope_theta": 1e4, "rope_scaling": {"rope_type": "foo", "factor": 2.0}})


@pytest.mark.parametrize("kind", KINDS)
def test_whole_model_beyond_the_original_length(kind, tmp_path):
    parameters = KINDS[kind]
    theirs = hf_models.make("Llama", rope_parameters=dict(parameters), head_dim=8)
    theirs.save_pretrained(tmp_path)
    tokens = np.random.default_rng(2).integers(hf_models.SIZES["vocab_size"], size=3 * ORIGINAL)
    expected = hf_models.reference(theirs, tokens)
    ours = hf_models.decoder(tmp_path)
    logits, boundaries, _ = hf_models.run_in_chunks(ours, tokens, [24, 24])
    assert_close(logits, expected.logits, "logits")
    assert_close(boundaries, expected.boundaries, "boundaries")

    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    values.pop("rope_parameters")
    path.write_text(json.dumps(values | old_form(parameters)))
    assert hf_models.decoder(tmp_path).config == ours.config
