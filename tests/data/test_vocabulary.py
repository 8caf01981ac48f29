"""The draft vocabulary: what is in it, and that it is never another's."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_jax.data import vocabulary
from eagle_jax.data.prepared import KIND, VERSION, PreparedData
from eagle_jax.data.records_file import RecordWriter
from eagle_jax.errors import CheckpointError, InputError


def test_most_frequent_first_ties_and_padding_by_lowest_id():
    counts = np.asarray([0, 5, 3, 3, 0, 9, 3, 0])
    assert vocabulary.select(counts, 3).ids.tolist() == [1, 2, 5]  # of the three with count 3, the lowest id
    assert vocabulary.select(counts, 7).ids.tolist() == [0, 1, 2, 3, 4, 5, 6]  # unused ids fill up, lowest first
    kept = vocabulary.select(counts, 3, always=[7, 5])
    assert kept.ids.tolist() == [1, 5, 7] and kept.ids.dtype == np.int32
    assert kept.coverage == 14 / 23 and vocabulary.select(counts, 8).coverage == 1.0


def test_offsets_and_mask():  # B14
    counts = np.zeros(12, int)
    counts[[0, 5, 9]] = 1
    chosen = vocabulary.select(counts, 3)
    assert chosen.ids.tolist() == [0, 5, 9] and chosen.d2t.tolist() == [0, 4, 7] and chosen.d2t.dtype == np.int64
    assert chosen.t2d.dtype == bool and np.flatnonzero(chosen.t2d).tolist() == [0, 5, 9]
    np.testing.assert_array_equal(np.arange(3) + chosen.d2t, chosen.ids)
    identity = vocabulary.select(counts, 12)
    assert not identity.d2t.any() and identity.t2d.all()


@given(st.lists(st.integers(0, 20), min_size=1, max_size=40).filter(sum), st.data())
def test_properties(counts, data):
    counts = np.asarray(counts)
    V = len(counts)
    size = data.draw(st.integers(1, V))
    always = data.draw(st.sets(st.integers(0, V - 1), max_size=size))
    chosen = vocabulary.select(counts, size, always=always)
    assert len(chosen.ids) == size == chosen.t2d.sum() and (np.diff(chosen.ids) > 0).all() and always <= {*chosen.ids}
    free = sorted(counts[[i for i in chosen.ids if i not in always]].tolist())
    left = counts[~chosen.t2d]
    assert not (free and left.size) or free[0] >= left.max()
    assert chosen.coverage == pytest.approx(counts[chosen.t2d].sum() / counts.sum())


@pytest.mark.parametrize("size", [0, -1, 9, 10**9])
def test_sizes_that_cannot_be(size):
    with pytest.raises(InputError, match=rf"must lie in \[1, 8\], the target's, found {size}"):
        vocabulary.select(np.ones(8, int), size)


def test_other_bad_input():
    with pytest.raises(InputError, match="3 end and special tokens do not fit into a draft vocabulary of 2"):
        vocabulary.select(np.ones(8, int), 2, always=[1, 2, 3])
    for outside in ([8], [-1]):
        with pytest.raises(InputError, match=r"outside \[0, 8\)"):
            vocabulary.select(np.ones(8, int), 2, always=outside)
    with pytest.raises(InputError, match="no answer token to count"):
        vocabulary.select(np.zeros(8, int), 2)


def prepared(folder, ids=(5, 5, 6, 9, 9, 9)):
    tokens = np.asarray([1, 1, 1, 1, 1, *ids], np.int32)  # the question repeats one token, which may not count
    with RecordWriter(folder, {"kind": KIND, "version": VERSION, "ids": [*ids]}, index=("length",)) as writer:
        for _ in range(3):
            writer.append({"tokens": tokens, "mask": np.arange(len(tokens)) >= 5}, length=len(tokens))
    return PreparedData(folder)


def test_only_answers_are_counted(tmp_path):
    data = prepared(tmp_path / "data")
    chosen = vocabulary.build(data, 2, vocab_size=12)
    assert chosen.ids.tolist() == [5, 9] and chosen.coverage == 5 / 6 and chosen.data == data.fingerprint
    with pytest.raises(InputError, match="holds the id 9, outside a vocabulary of 8"):
        vocabulary.build(data, 2, vocab_size=8)
    with pytest.raises(InputError, match="found 13"):
        vocabulary.build(data, 13, vocab_size=12)


def test_sizes_and_data_have_files_of_their_own(tmp_path):  # B17
    one, other = prepared(tmp_path / "one"), prepared(tmp_path / "other", ids=(2, 3, 4))
    paths = {
        (data, size): vocabulary.cached_path(tmp_path, size, data.fingerprint)
        for data in (one, other)
        for size in (3, 6)
    }
    assert len({*paths.values()}) == 4
    for (data, size), path in paths.items():
        vocabulary.save(vocabulary.build(data, size, vocab_size=12), path)
    for (data, size), path in paths.items():
        found = vocabulary.load(path, vocab_size=12)
        assert (found.size, found.data) == (size, data.fingerprint)


def test_what_is_saved_is_loaded(tmp_path):  # B15: the stored table, bit for bit
    path = tmp_path / "vocabulary.json"
    chosen = vocabulary.select(np.asarray([3, 0, 2, 0, 9]), 3, data="abc")
    vocabulary.save(chosen, path)
    found = vocabulary.load(path, vocab_size=5)
    np.testing.assert_array_equal(found.ids, chosen.ids)
    assert found.ids.dtype == np.int32 and (found.vocab_size, found.coverage, found.data) == (5, 1.0, "abc")
    assert [p.name for p in tmp_path.iterdir()] == ["vocabulary.json"]
    with pytest.raises(InputError, match="for a target of 5 tokens, this one has 6"):
        vocabulary.load(path, vocab_size=6)
    with pytest.raises(InputError, match="cannot read"):
        vocabulary.load(tmp_path / "absent.json")
    good = json.loads(path.read_text())
    for changes, message in (
        ({"format": "x"}, "not a draft vocabulary"),
        ({"version": 2}, "not a draft vocabulary of version 1"),
        ({"ids": [2, 0, 4]}, "must ascend"),
        ({"ids": [0, 0, 4]}, "must ascend"),
        ({"ids": [0, 2, 5]}, r"within \[0, 5\)"),
        ({"ids": []}, "must ascend"),
        ({"ids": "x"}, "is damaged"),
        ({"ids": [0, 3, 4]}, "was changed after it was written"),
        ({"size": 4}, "was changed after it was written"),
    ):
        path.write_text(json.dumps(good | changes))
        with pytest.raises(CheckpointError, match=message):
            vocabulary.load(path)
    path.write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        vocabulary.load(path)
