"""Folders of records: what is written is read, and what is damaged, foreign or unfinished is named."""

import json
import pickle
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

from eagle_jax.data.records_file import RecordWriter, decode_record, encode_record
from eagle_jax.data.records_reader import RecordReader
from eagle_jax.errors import CheckpointError, InputError

META = {"kind": "test", "numbers": [1, 2]}


def record(i):
    n = i % 5 + 1
    return {
        "tokens": np.arange(n, dtype=np.int32) + i,
        "aux": np.full((n, 3, 2), i / 3, ml_dtypes.bfloat16),
        "mask": np.arange(n) % 2 == 0,
    }


def write(folder, count=10, first=0, **options):
    options = {"records_per_shard": 4, "index": ("length",)} | options
    with RecordWriter(folder, META, **options) as writer:
        for i in range(first or len(writer), count):
            writer.append(record(i), length=len(record(i)["tokens"]))
        writer.summary["count"] = count
    return folder


def same(a, b):
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and np.array_equal(a[k], b[k]) for k in a)


def hidden(folder):
    return folder.with_name(f".{folder.name}.partial")


def test_records_by_number(tmp_path):
    reader = RecordReader(write(tmp_path / "r"))
    assert len(reader) == 10 and reader.metadata == META and reader.summary == {"count": 10} and reader.complete
    np.testing.assert_array_equal(reader.index["length"], [i % 5 + 1 for i in range(10)])
    for i in (9, 0, 4, 3, np.int64(7)):
        assert same(reader[i], record(int(i)))
    for i in (-1, 10):
        with pytest.raises(IndexError):
            reader[i]
    assert sorted(path.name for path in reader.folder.iterdir())[0] == "metadata.json"
    assert len(list(tmp_path.iterdir())) == 1, "nothing but the folder is left"
    sent = pickle.loads(pickle.dumps(reader))
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda i: same(sent[i % 10], record(i % 10)), range(200)))


def test_every_dtype_survives():
    for dtype in (np.int32, np.uint16, np.float16, np.float32, np.int64, np.bool_, ml_dtypes.bfloat16):
        values = {"x": np.asarray([[0, 1, 3]]).astype(dtype), "empty": np.zeros((0, 4), dtype)}
        assert same(decode_record(encode_record(values)), values)


def test_an_interrupted_writer_leaves_nothing_or_what_it_needs_to_resume(tmp_path):
    class Stop(Exception):
        pass

    def interrupted(**options):
        with (
            pytest.raises(Stop),
            RecordWriter(tmp_path / "r", META, records_per_shard=4, index=("length",), **options) as writer,
        ):
            for i in range(6):
                writer.append(record(i), length=len(record(i)["tokens"]))
            raise Stop

    interrupted()
    assert not list(tmp_path.iterdir())
    interrupted(resume=True)
    assert not (tmp_path / "r").exists() and hidden(tmp_path / "r").exists()
    with pytest.raises(InputError, match=r"begun with other settings \(numbers\)"):
        RecordWriter(tmp_path / "r", META | {"numbers": [3]}, records_per_shard=4, index=("length",), resume=True)
    with pytest.raises(InputError, match=r"begun with other settings \(records_per_shard\)"):
        RecordWriter(tmp_path / "r", META, records_per_shard=5, index=("length",), resume=True)
    assert len(RecordWriter(tmp_path / "r", META, records_per_shard=4, index=("length",), resume=True)) == 4
    resumed = RecordReader(write(tmp_path / "r", resume=True))
    assert len(resumed) == 10 and all(same(resumed[i], record(i)) for i in range(10))
    whole = write(tmp_path / "whole")
    for path in whole.iterdir():  # stopped and resumed or not: the same bytes
        assert path.read_bytes() == (resumed.folder / path.name).read_bytes()


def test_a_folder_can_be_followed_while_it_grows(tmp_path):
    writer = RecordWriter(tmp_path / "r", META, records_per_shard=2, in_place=True, resume=True, compress=False)
    reader = RecordReader(tmp_path / "r", growing=True)
    assert len(reader) == 0 and not reader.complete
    for i in range(5):
        writer.append(record(i))
    reader.refresh()
    assert len(reader) == 4 and same(reader[3], record(3))
    with pytest.raises(CheckpointError, match="is not complete"):
        RecordReader(tmp_path / "r")
    writer.close()
    reader.refresh()
    assert len(reader) == 5 and reader.complete and same(reader[4], record(4))


def test_folders_that_are_there_already(tmp_path):
    write(tmp_path / "r")
    with pytest.raises(InputError, match="exists already"):
        write(tmp_path / "r")
    assert len(RecordReader(write(tmp_path / "r", 3, overwrite=True))) == 3
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("x")
    for options in ({}, {"overwrite": True}, {"in_place": True}):
        with pytest.raises(InputError, match="no folder of records; it is not overwritten"):
            write(tmp_path / "other", **options)
    with pytest.raises(InputError, match="nothing to write"):
        write(tmp_path / "empty", 0)
    with pytest.raises(InputError, match="at least 1"):
        write(tmp_path / "empty", records_per_shard=0)


def damage(folder, name, change):
    path = folder / name
    path.write_bytes(change(path.read_bytes()))


def swap(folder, a, b):
    first, second = (folder / a).read_bytes(), (folder / b).read_bytes()
    (folder / a).write_bytes(second)
    (folder / b).write_bytes(first)


def edit(folder, **changes):
    path = folder / "metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("harm", "error", "message"),
    [
        (lambda f: damage(f, "shard-00001.array_record", lambda b: b[:-9]), CheckpointError, "shard-00001.*is damaged"),
        (lambda f: (f / "shard-00002.array_record").unlink(), CheckpointError, "shard-00002.*No such file"),
        (lambda f: (f / "shard-00000.index").unlink(), CheckpointError, "shard-00000.index.*No such file"),
        (lambda f: damage(f, "shard-00000.index", lambda b: b[:9]), CheckpointError, "shard-00000.index: is damaged"),
        (lambda f: swap(f, "shard-00000.index", "shard-00002.index"), CheckpointError, "does not belong to its shard"),
        (lambda f: edit(f, schema_version=2), CheckpointError, "schema version 2, this program reads 1"),
        (lambda f: edit(f, format="x"), CheckpointError, "not of a folder of records"),
        (lambda f: edit(f, complete=False), CheckpointError, "is not complete"),
        (lambda f: damage(f, "metadata.json", lambda b: b[:-9]), CheckpointError, "not valid JSON"),
        (lambda f: (f / "metadata.json").unlink(), InputError, "cannot read: No such file.*expected a folder"),
    ],
)
def test_damaged_folders(tmp_path, harm, error, message):
    harm(write(tmp_path / "r"))
    with pytest.raises(error, match=message):
        RecordReader(tmp_path / "r")


def test_a_damaged_record_is_found_when_it_is_read(tmp_path):
    write(tmp_path / "r")
    damage(tmp_path / "r", "shard-00001.array_record", lambda b: b.replace(b[200:240], bytes(40), 1))
    reader = RecordReader(tmp_path / "r")
    assert same(reader[0], record(0))
    with pytest.raises(CheckpointError, match=r"shard-00001.array_record: record \d cannot be read"):
        for i in range(4, 8):
            reader[i]
