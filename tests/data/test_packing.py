"""Packing: no token is lost or doubled; batches are the same for any number of hosts; a position can be saved."""

import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_jax.data.masks import TokenizedChat
from eagle_jax.data.packing import PackedBatches, pack_chats, plan_rows
from eagle_jax.data.records_file import RecordWriter
from eagle_jax.data.records_reader import RecordReader
from eagle_jax.data.training_rows import training_rows
from eagle_jax.errors import CheckpointError, InputError

T = 16


def chat(number, n, answer):
    """Tokens that name their chat and place; the answer starts at `answer`."""
    return TokenizedChat(np.arange(n, dtype=np.int32) + 100 * (number + 1), np.arange(n) >= answer)


def store(folder, chats):
    with RecordWriter(folder, {}, records_per_shard=5, index=("length", "first_answer")) as writer:
        for c in chats:
            record = {"tokens": c.tokens, "mask": c.mask, "aux": np.repeat(c.tokens, 2).reshape(-1, 1, 2) / 2}
            writer.append(record, length=len(c.tokens), first_answer=int(np.argmax(c.mask)))
    return RecordReader(folder)


@pytest.fixture(scope="module")
def chats():
    random = np.random.default_rng(0)
    lengths = random.integers(2, T + 1, 37)
    return [chat(i, int(n), int(random.integers(1, n))) for i, n in enumerate(lengths)]


@pytest.fixture(scope="module")
def records(tmp_path_factory, chats):
    return store(tmp_path_factory.mktemp("packing") / "r", chats)


lengths_strategy = st.lists(st.integers(1, T), max_size=60)


@given(lengths_strategy, st.integers(0, 2**32), st.integers(1, 8))
def test_every_document_is_in_one_row_that_holds_it(lengths, seed, pool):
    lengths = np.asarray(lengths, np.int64)
    plan = plan_rows(lengths, T, seed=seed, pool=pool)
    assert sorted(i for row in plan for i in row) == list(range(len(lengths)))
    assert all(0 < lengths[row].sum() <= T for row in plan)
    again = plan_rows(lengths, T, seed=seed, pool=pool)
    assert [row.tolist() for row in plan] == [row.tolist() for row in again]


@given(lengths_strategy.filter(bool), st.integers(0, 100))
def test_every_token_appears_once_in_order(lengths, seed):
    made = [chat(i, n, n // 2) for i, n in enumerate(lengths)]
    seen = []
    for row in pack_chats(made, T, seed=seed):
        assert row.tokens.shape == row.mask.shape == row.documents.shape == row.positions.shape == (T,)
        assert (row.tokens.dtype, row.mask.dtype, row.documents.dtype) == (np.int32, bool, np.int32)
        used = int((row.documents > 0).sum())
        assert (row.documents[used:] == 0).all(), "padding only at the end"
        assert not row.tokens[used:].any() and not row.mask[used:].any() and not row.positions[used:].any()
        steps = np.diff(row.documents[:used])
        assert row.documents[0] == 1 and set(steps.tolist()) <= {0, 1}, "documents ascend"
        for number in range(1, int(row.documents.max()) + 1):
            here = row.documents == number
            original = made[int(row.tokens[here][0]) // 100 - 1]
            np.testing.assert_array_equal(row.tokens[here], original.tokens)
            np.testing.assert_array_equal(row.mask[here], original.mask)
            np.testing.assert_array_equal(row.positions[here], np.arange(here.sum()))
            seen.append(int(row.tokens[here][0]) // 100 - 1)
    assert sorted(seen) == list(range(len(made)))


def test_little_is_padding():
    lengths = np.random.default_rng(1).integers(50, 900, 3000)
    plan = plan_rows(lengths, 1024, seed=0)
    assert lengths.sum() / (len(plan) * 1024) > 0.97
    assert [r.tolist() for r in plan] != [r.tolist() for r in plan_rows(lengths, 1024, seed=1)]
    with pytest.raises(ValueError, match="must lie in"):
        plan_rows(np.asarray([3, 1025]), 1024, seed=0)


def epoch_tokens(batches):
    listed = [token for batch in batches for token in batch["tokens"][batch["documents"] > 0].tolist()]
    assert len(listed) == len(set(listed))
    return sorted(listed)


def test_an_epoch_holds_every_token_once(records, chats):
    rows = training_rows(records.folder, length=T, batch_size=4, seed=3, num_epochs=1)
    batches = list(rows)
    assert len(batches) == rows.batches.num_batches == -(-rows.batches.num_rows // 4)
    assert all(set(b) == {"tokens", "mask", "documents", "positions"} and b["tokens"].shape == (4, T) for b in batches)
    assert epoch_tokens(batches) == sorted(t for c in chats for t in c.tokens.tolist())
    assert rows.batches.num_tokens == sum(len(c.tokens) for c in chats)
    real = sum(int((b["documents"][:, 0] > 0).sum()) for b in batches)
    assert real == rows.batches.num_rows, "the last batch is filled up with padding only"


def test_epochs_differ_in_order_and_hold_the_same(records):
    batches = PackedBatches(records, length=T, batch_size=1, seed=3, num_epochs=3)
    R = batches.num_rows
    epochs = [[batches[e * R + i] for i in range(R)] for e in range(3)]
    firsts = [[int(b["tokens"][0, 0]) for b in epoch] for epoch in epochs]
    assert firsts[0] != firsts[1] != firsts[2] and epoch_tokens(epochs[0]) == epoch_tokens(epochs[2])
    assert PackedBatches(records, length=T, batch_size=1, seed=3).num_batches is None


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_any_number_of_hosts_reads_the_same_batches(records, hosts):
    whole = training_rows(records.folder, length=T, batch_size=4, seed=5, num_epochs=2)
    parts = [
        training_rows(records.folder, length=T, batch_size=4, seed=5, num_epochs=2, shard_index=i, shard_count=hosts)
        for i in range(hosts)
    ]
    for batch, *pieces in zip(whole, *parts, strict=True):
        for name, array in batch.items():
            np.testing.assert_array_equal(array, np.concatenate([piece[name] for piece in pieces]))


@pytest.mark.parametrize("taken", [0, 1, 7, 11])
def test_a_saved_position_is_continued_exactly(records, taken):
    def rows(**changes):
        return training_rows(records.folder, **({"length": T, "batch_size": 4, "seed": 5, "num_epochs": 3} | changes))

    first = rows()
    for _ in range(taken):
        next(first)
    state = json.loads(json.dumps(first.get_state()))
    rest = list(first)
    second = rows()
    next(second)
    second.set_state(state)
    again = list(second)
    assert len(rest) == len(again) > 0
    for a, b in zip(rest, again, strict=True):
        assert all(np.array_equal(a[name], b[name]) for name in a)
    # Hosts may come and go between the two; what is read may not change.
    half = rows(shard_index=1, shard_count=2)
    half.set_state(state)
    np.testing.assert_array_equal(next(half)["tokens"], rest[0]["tokens"][2:])
    for changes in ({"seed": 6}, {"batch_size": 2}, {"length": T + 1}):
        with pytest.raises(CheckpointError, match="data, length, batch size or seed have changed"):
            rows(**changes).set_state(state)


def test_long_chats_are_cut_and_those_without_an_answer_left_out(tmp_path):
    made = [chat(0, 20, 3), chat(1, 20, 8), chat(2, 6, 5), chat(3, 9, 8)]
    records = store(tmp_path / "r", made)
    batches = PackedBatches(records, length=8, batch_size=1, seed=0, num_epochs=1)
    assert (batches.num_records, batches.num_dropped, batches.num_cut, batches.num_tokens) == (4, 2, 1, 14)
    rows = [batches[i] for i in range(batches.num_batches)]
    assert epoch_tokens(rows) == [*range(100, 108), *range(300, 306)]
    assert all(row["mask"][row["documents"] == d].any() for row in rows for d in set(row["documents"].flat) - {0})
    with pytest.raises(InputError, match="no answer begins within the first 3 tokens"):
        PackedBatches(records, length=3, batch_size=1, seed=0)


def test_other_arrays_are_packed_alike(records):
    batch = PackedBatches(records, length=T, batch_size=2, seed=0, arrays=("tokens", "aux"))[0]
    assert batch["aux"].shape == (2, T, 1, 2) and batch["aux"].dtype == np.float64
    np.testing.assert_array_equal(batch["aux"][..., 0, 1] * 2, batch["tokens"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 1}, "length must be at least 2"),
        ({"batch_size": 0}, "found 16, 0, None"),
        ({"num_epochs": 0}, "num_epochs 1"),
        ({"shard_count": 3}, "no part for host 0 of 3"),
        ({"shard_index": 2, "shard_count": 2}, "host 2 of 2"),
    ],
)
def test_sizes_that_cannot_be(records, changes, message):
    with pytest.raises(InputError, match=message):
        PackedBatches(records, **({"length": T, "batch_size": 4, "seed": 0} | changes))


def test_records_without_lengths(tmp_path):
    with RecordWriter(tmp_path / "r", {}) as writer:
        writer.append({"x": np.zeros(3)})
    with pytest.raises(InputError, match="its index has no length"):
        PackedBatches(RecordReader(tmp_path / "r"), length=T, batch_size=1, seed=0)


def test_batches_can_be_sent_to_another_process(records):
    batches = PackedBatches(records, length=T, batch_size=2, seed=0)
    sent = pickle.loads(pickle.dumps(batches))
    assert all(np.array_equal(batches[5][name], sent[5][name]) for name in batches[5])
