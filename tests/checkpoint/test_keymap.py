"""Layout tables: both directions, every error gathered."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from eagle_jax.checkpoint.keymap import Rule, check, is_finite, not_finite, plan, read_piece
from eagle_jax.checkpoint.tensors import TensorInfo
from eagle_jax.errors import CheckpointError

RULES = (
    Rule("model.embed_tokens.weight", "embed.weight"),
    Rule("model.layers.{i}.q_proj.weight", "layers.q_proj.kernel", transpose=True, stacked=True),
    Rule("model.layers.{i}.norm.weight", "layers.norm.scale", stacked=True),
    Rule("blocks.{i}.fc.weight", "blocks.{i}.fc.kernel", transpose=True),
)
SHAPES = {
    "embed.weight": (7, 4),
    "layers.q_proj.kernel": (2, 4, 6),
    "layers.norm.scale": (2, 4),
    "blocks.0.fc.kernel": (4, 3),
    "blocks.11.fc.kernel": (4, 3),
}
STORED = {
    "model.embed_tokens.weight": (7, 4),
    "model.layers.0.q_proj.weight": (6, 4),
    "model.layers.1.q_proj.weight": (6, 4),
    "model.layers.0.norm.weight": (4,),
    "model.layers.1.norm.weight": (4,),
    "blocks.0.fc.weight": (3, 4),
    "blocks.11.fc.weight": (3, 4),
}


@dataclasses.dataclass
class MemorySource:
    tensors: dict
    where: str = "some/folder"

    def keys(self):
        return list(self.tensors)

    def info(self, name):
        return TensorInfo(self.tensors[name].shape, self.tensors[name].dtype, "some/file")

    def read(self, name, index=None):
        return self.tensors[name] if index is None else self.tensors[name][index]


def source(**changes):
    tensors = {n: np.arange(np.prod(s), dtype=np.float32).reshape(s) for n, s in STORED.items()}
    return MemorySource(tensors | changes)


def test_plan_names_every_stored_tensor():
    pieces = plan(RULES, SHAPES)
    assert {p.name: p.shape for p in pieces} == STORED
    assert [(p.path, p.layer) for p in pieces if "q_proj" in p.name] == [
        ("layers.q_proj.kernel", 0),
        ("layers.q_proj.kernel", 1),
    ]
    check(pieces, source())


def test_write_then_read_is_the_identity():
    rng = np.random.default_rng(0)
    model = {path: rng.normal(size=shape).astype(np.float32) for path, shape in SHAPES.items()}
    stored = {}
    for piece in plan(RULES, SHAPES):
        value = model[piece.path] if piece.layer is None else model[piece.path][piece.layer]
        stored[piece.name] = value.T if piece.transpose else value
    files = MemorySource(stored)
    for piece in plan(RULES, SHAPES):
        value = model[piece.path] if piece.layer is None else model[piece.path][piece.layer]
        np.testing.assert_array_equal(read_piece(files, piece), value)
        if piece.transpose:
            index = (slice(1, 3), slice(0, 2))
            np.testing.assert_array_equal(read_piece(files, piece, index), value[index])


def test_every_problem_is_gathered():
    files = source(**{"stray.weight": np.zeros(3, np.float32), "blocks.0.fc.weight": np.zeros((4, 3), np.float32)})
    del files.tensors["model.layers.1.norm.weight"]
    files.tensors["model.embed_tokens.weight"] = np.zeros((7, 4), np.int8)
    with pytest.raises(CheckpointError) as error:
        check(plan(RULES, SHAPES), files)
    message = str(error.value)
    assert message.startswith("some/folder: ")
    for part in (
        "missing: model.layers.1.norm.weight",
        "unknown: stray.weight",
        "blocks.0.fc.weight is [4, 3], the configuration wants [3, 4]",
        "model.embed_tokens.weight is int8",
    ):
        assert part in message


def test_ignored_names_are_not_unknown():
    files = source(**{"model.layers.0.rotary_emb.inv_freq": np.zeros(2, np.float32)})
    check(plan(RULES, SHAPES), files, ignore=["*.rotary_emb.inv_freq"])
    with pytest.raises(CheckpointError, match="inv_freq"):
        check(plan(RULES, SHAPES), files)


def test_a_path_without_a_rule_is_a_bug():
    with pytest.raises(ValueError, match="matches 0 rules"):
        plan(RULES, {"other.kernel": (2, 2)})
    with pytest.raises(ValueError, match="both sides"):
        Rule("layers.{i}.weight", "weight")


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_is_finite(dtype):
    fine = np.array([0, -0.0, 1, -3.5, np.finfo(np.float16).max], dtype)
    assert is_finite(fine)
    for bad in (np.nan, np.inf, -np.inf):
        assert not is_finite(np.append(fine, np.array(bad, dtype)))
        assert not is_finite(np.array([[1, bad], [2, 3]], dtype).T)


def test_not_finite_names_tensor_and_file():
    message = str(not_finite(source(), ["blocks.0.fc.weight"]))
    assert "some/file" in message and "blocks.0.fc.weight" in message
