"""d2t and t2d: offsets on disk, ascending ids in memory, every mistake refused."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from drafter_folders import (
    PLAIN,
    flat_values,
    plain_folder,
    random_arrays,
    refuse,
    stored_arrays,
    write_folder,
)
from safetensors.numpy import load_file

from eagle_jax.checkpoint.drafter_checkpoint import open_drafter
from eagle_jax.checkpoint.export import export_drafter


def tables(ids, vocab=24):
    ids = np.asarray(ids, np.int64)
    return {"d2t": ids - np.arange(len(ids)), "t2d": np.isin(np.arange(vocab), ids)}


def test_offsets_become_ids_and_stay_integers(tmp_path):
    """B14: targets [0, 5, 9] are d2t [0, 4, 7]."""
    config = dataclasses.replace(PLAIN, draft_vocab_size=3, vocab_size=130000)
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
    refuse(plain_folder(tmp_path, tensors={"d2t": d2t}, drop=["t2d"]), "d2t", *words)


def test_tables_that_disagree(tmp_path):
    good = tables(GOOD)
    assert open_drafter(plain_folder(tmp_path, tensors=good)).read("draft_to_target").tolist() == GOOD
    other = good["t2d"].copy()
    other[[1, 2]] = False, True
    refuse(
        plain_folder(tmp_path, tensors=good | {"t2d": other}), "t2d", "disagrees with d2t about 2 target ids (first: 1)"
    )
    refuse(plain_folder(tmp_path, tensors=good | {"t2d": other[:20]}), "t2d", "expected bool [24]")


def test_full_vocabulary_tables(tmp_path):
    """B13, B14: none, or zeros and ones; an identity written as 0, 1, 2 names wrong tokens."""
    full = {"lm_head.weight": np.ones((24, 16), np.float32)}
    changes = {"draft_vocab_size": 24}
    assert open_drafter(plain_folder(tmp_path, changes, full, drop=["d2t", "t2d"])).config.full_vocabulary
    trivial = {"d2t": np.zeros(24, np.int64), "t2d": np.ones(24, np.bool_)}
    found = open_drafter(plain_folder(tmp_path, changes, full | trivial))
    assert "draft_to_target" not in found.keys()  # noqa: SIM118 (not a dict)
    refuse(
        plain_folder(tmp_path, changes, full | trivial | {"d2t": np.arange(24)}),
        "d2t",
        "the identity written as 0, 1, 2",
    )
    refuse(plain_folder(tmp_path, changes, full | trivial | {"t2d": np.zeros(24, np.bool_)}), "t2d", "24 target ids")
    refuse(plain_folder(tmp_path, drop=["d2t"]), "d2t is missing", "(8)", "(24)")


def test_safeailab_must_say_its_draft_vocabulary(tmp_path):
    changes = {"draft_vocab_size": None, "architectures": None}
    refuse(plain_folder(tmp_path, changes), "draft_vocab_size: missing")
