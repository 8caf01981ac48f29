"""Reading and writing tensors: slices, every file form, damage, and writes that never leave half a file."""

import builtins
import json
import os
import weakref

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from eagle_jax.checkpoint import safetensors_file
from eagle_jax.checkpoint.tensors import MemorySource, open_tensors, write_safetensors
from eagle_jax.errors import CheckpointError, EagleJaxError

BF16 = np.dtype(ml_dtypes.bfloat16)
ODD = np.array([0.0, -0.0, 1e-40, 3.14, np.inf, -np.inf, np.nan], np.float32).astype(BF16)
TENSORS = {
    "a.weight": np.arange(24, dtype=np.float32).reshape(4, 6),
    "b.weight": ODD,
    "c": np.arange(3, dtype=np.int64),
    "d": np.array([True, False, True]),
    "e": np.zeros((0, 5), np.float16),
    "scalar": np.array(2.5, np.float16),
}


def bits(array):
    return (array.dtype, array.shape, array.tobytes())


def entries(tensors):
    return [(name, array.shape, array.dtype, lambda array=array: array) for name, array in tensors.items()]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    return path


def test_every_dtype_is_read_bit_for_bit(file):
    source = open_tensors(file.parent)
    assert sorted(source.keys()) == sorted(TENSORS)
    for name, array in TENSORS.items():
        info = source.info(name)
        assert (info.shape, info.dtype, info.file) == (array.shape, array.dtype, str(file))
        assert bits(source.read(name)) == bits(array)


def test_only_the_slice_is_read(file, monkeypatch):
    source = open_tensors(file)
    index = (slice(1, 3), slice(2, 5))
    np.testing.assert_array_equal(source.read("a.weight", index), TENSORS["a.weight"][index])
    assert source.read("e", (slice(0, 0), slice(1, 3))).shape == (0, 2)
    # Whole-file reads are not how it is done: the file is mapped, and the mapping is gone afterwards.
    monkeypatch.setattr(type(file), "read_bytes", lambda self: pytest.fail("read the whole file"))
    assert source.read("a.weight", index).base is None


def test_unknown_tensor(file):
    for source in (open_tensors(file), MemorySource(TENSORS, "ram")):
        with pytest.raises(CheckpointError, match="no tensor named 'x'"):
            source.read("x")


def test_written_file_is_what_the_reference_library_reads(tmp_path):
    path = tmp_path / "out.safetensors"
    write_safetensors(path, entries(TENSORS))
    with safe_open(path, "np") as reference:
        assert reference.metadata() == {"format": "pt"}
        for name, array in TENSORS.items():
            assert bits(reference.get_tensor(name)) == bits(array)
    header = json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])
    header.pop("__metadata__")
    for name, entry in header.items():  # torch maps a tensor only when it is aligned to its own size
        assert entry["data_offsets"][0] % max(TENSORS[name].dtype.itemsize, 1) == 0


def test_writing_holds_one_array_at_a_time(tmp_path):
    alive = []

    def produce(i):
        assert not alive, "the array before is still held"
        array = np.full((4,), i, np.float32)
        alive.append(i)
        weakref.finalize(array, alive.clear)
        return array

    write_safetensors(
        tmp_path / "x.safetensors", [(f"t{i}", (4,), np.float32, lambda i=i: produce(i)) for i in range(5)]
    )
    assert load_file(tmp_path / "x.safetensors")["t4"][0] == 4


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, OSError(28, "No space left on device")])
def test_an_interrupted_write_leaves_nothing(tmp_path, error):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"the file before")

    def fail():
        raise error

    expected = CheckpointError if isinstance(error, OSError) else error
    with pytest.raises(expected) as caught:
        write_safetensors(
            path, [("a", (2,), np.float32, lambda: np.zeros(2, np.float32)), ("b", (2,), np.float16, fail)]
        )
    if expected is CheckpointError:
        assert str(caught.value) == f"{path}: cannot write: No space left on device"
    assert [f.name for f in tmp_path.iterdir()] == ["model.safetensors"]
    assert path.read_bytes() == b"the file before"


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_at_the_end_leaves_nothing(tmp_path, monkeypatch, call):
    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors_file.os, call, fail)
    with pytest.raises(CheckpointError, match="No space left on device"):
        write_safetensors(tmp_path / "model.safetensors", entries(TENSORS))
    assert list(tmp_path.iterdir()) == []


def test_data_is_on_disk_before_the_name_appears(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        original = getattr(os, name)
        monkeypatch.setattr(
            safetensors_file.os, name, lambda *a, name=name, original=original: (calls.append(name), original(*a))[1]
        )
    write_safetensors(tmp_path / "model.safetensors", entries(TENSORS))
    assert calls == ["fsync", "replace", "fsync"]


def test_entries_that_lie(tmp_path):
    path = tmp_path / "x.safetensors"
    for shape, dtype in (((3,), np.float32), ((2,), np.float16)):
        with pytest.raises(CheckpointError, match="t: expected"):
            write_safetensors(path, [("t", shape, dtype, lambda: np.zeros(2, np.float32))])
    with pytest.raises(CheckpointError, match="t is given twice"):
        write_safetensors(path, [("t", (), np.float32, lambda: np.float32(0))] * 2)
    with pytest.raises(CheckpointError, match="complex64"):
        write_safetensors(path, [("t", (), np.complex64, lambda: np.complex64(0))])
    assert list(tmp_path.iterdir()) == []


# Damage


def header_file(path, header, data=b"", length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"t": entry()}, b"1234", "truncated: 8 bytes of tensors expected, found 4"),
        ({"t": entry()}, b"123456789", "longer than its header says"),
        ({"t": entry(), "u": entry(offsets=(4, 12))}, b"0" * 12, "u: its data overlaps"),
        ({"t": entry(), "u": entry(offsets=(0, 8))}, b"0" * 8, "u: its data overlaps"),
        ({"t": entry(), "u": entry(offsets=(12, 20))}, b"0" * 20, "u: its data leaves a gap"),
        ({"t": entry(shape=(3,))}, b"0" * 8, "t: F32 .3. takes 12 bytes, the header gives it 8"),
        ({"t": entry(shape=(2**62, 2**62))}, b"0" * 8, "t: F32"),
        ({"t": entry(shape=(-2,))}, b"0" * 8, "t: shape"),
        ({"t": entry(shape=(True, 2))}, b"0" * 8, "t: shape"),
        ({"t": entry(offsets=(8, 0))}, b"0" * 8, "t: F32"),
        ({"t": entry("F8_E4M3", (8,))}, b"0" * 8, "t: dtype 'F8_E4M3' is not supported"),
        ({"t": {"dtype": "F32", "shape": [2]}}, b"0" * 8, "t: expected dtype, shape and data_offsets"),
        ({"t": 3}, b"", "t: expected dtype"),
        ([1], b"", "expected a JSON object, found list"),
        (b"{not json", b"", "not valid JSON"),
        (b"\xff\xfe", b"", "not valid JSON"),
        (b"[" * 100_000, b"", "not valid JSON"),
        (b'{"t":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', b"0" * 8, "'dtype' appears twice"),
        (
            b'{"t":' + json.dumps(entry()).encode() + b',"t":' + json.dumps(entry()).encode() + b"}",
            b"0" * 8,
            "'t' appears",
        ),
        ({"__metadata__": 3, "t": entry()}, b"0" * 8, "__metadata__"),
    ],
)
def test_damaged_headers_name_the_tensor_and_the_file(tmp_path, header, data, message):
    path = header_file(tmp_path / "model.safetensors", header, data)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_tensors(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"1234567", b"\xff" * 16, (10**9).to_bytes(8, "little") + b"{}"])
def test_not_a_safetensors_file(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="truncated, or not a safetensors file"):
        open_tensors(tmp_path)


def test_booleans_that_are_neither(tmp_path):
    path = header_file(tmp_path / "model.safetensors", {"t2d": entry("BOOL", (2,), (0, 2))}, b"\x01\x07")
    with pytest.raises(CheckpointError, match="t2d: booleans must be stored as 0 or 1"):
        open_tensors(path).read("t2d")


def test_a_file_that_shrinks_after_opening(file):
    source = open_tensors(file)
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match="changed while it was being read"):
        source.read("a.weight")
    file.unlink()
    with pytest.raises(CheckpointError, match="cannot read: No such file"):
        source.read("a.weight")


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_fuzzed_files_are_read_or_refused(tmp_path_factory, data):
    """Truncations and flipped bytes in the header: an EagleJaxError, or tensors within the file."""
    path = tmp_path_factory.mktemp("fuzz") / "model.safetensors"
    save_file(TENSORS, path)
    raw = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
    else:
        end = 8 + int.from_bytes(raw[:8], "little")
        for _ in range(data.draw(st.integers(1, 3))):
            raw[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(raw))
    try:
        source = open_tensors(path)
        for name in source.keys():  # noqa: SIM118 (not a dict)
            source.read(name)
    except EagleJaxError as error:
        assert str(path) in str(error)


# Folders


def sharded(tmp_path, weight_map=None, **files):
    for name, tensors in files.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
    if weight_map is None:
        weight_map = {tensor: f"{name}.safetensors" for name, tensors in files.items() for tensor in tensors}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return index


ONE, TWO = {"a": np.ones(2, np.float32)}, {"b": np.full(3, 2, np.float16)}


def test_shards(tmp_path):
    sharded(tmp_path, one=ONE, two=TWO)
    source = open_tensors(tmp_path)
    assert source.keys() == ["a", "b"]
    assert source.info("b").file.endswith("two.safetensors")
    np.testing.assert_array_equal(source.read("b", (slice(1, 3),)), [2, 2])


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "one.safetensors", "c": "three.safetensors"}, "missing shards: three.safetensors"),
        ({"a": "one.safetensors", "c": "two.safetensors"}, "c: named by the index, absent from two.safetensors"),
        ({"a": "../one.safetensors"}, "shards must be weight files in the index's own folder"),
        ({"a": "/etc/passwd"}, "shards must be weight files"),
        ({"a": "config.json"}, "shards must be weight files"),
        ({"a": 3}, "weight_map must be an object"),
        ({}, "weight_map must be an object"),
        ([], "weight_map must be an object"),
    ],
)
def test_indexes_that_do_not_fit(tmp_path, weight_map, message):
    index = sharded(tmp_path, weight_map, one=ONE, two=TWO)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_tensors(tmp_path)
    assert str(index) in str(caught.value)


def test_a_tensor_in_two_shards(tmp_path):
    sharded(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"}, one=ONE, two=TWO | ONE)
    with pytest.raises(CheckpointError, match=r"a is in .*one.safetensors and again in two.safetensors"):
        open_tensors(tmp_path)


def test_a_folder_without_or_with_too_many_weights(tmp_path):
    with pytest.raises(CheckpointError, match="holds no weights"):
        open_tensors(tmp_path)
    with pytest.raises(CheckpointError, match="no such file or folder"):
        open_tensors(tmp_path / "nothing")
    (tmp_path / "x.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match="unknown kind of file"):
        open_tensors(tmp_path / "x.gguf")
    save_file(ONE, tmp_path / "draft.safetensors")
    assert open_tensors(tmp_path).keys() == ["a"]
    save_file(ONE, tmp_path / "draft2.safetensors")
    with pytest.raises(CheckpointError, match=r"which of draft.safetensors, draft2.safetensors"):
        open_tensors(tmp_path)


# PyTorch's files


@pytest.mark.parametrize("zipped", [True, False])
def test_torch_files_keep_every_bit(tmp_path, zipped):
    torch = pytest.importorskip("torch")
    state = {
        "a": torch.arange(6, dtype=torch.float16).reshape(2, 3),
        "b": torch.from_numpy(ODD.view(np.int16)).view(torch.bfloat16),
        "t2d": torch.tensor([True, False]),
        "d2t": torch.arange(3),
        "turned": torch.arange(6, dtype=torch.float32).reshape(2, 3).T,
    }
    torch.save(state, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    source = open_tensors(tmp_path)
    assert bits(source.read("b")) == bits(ODD)
    np.testing.assert_array_equal(source.read("a", (slice(0, 1), slice(1, 3))), [[1, 2]])
    np.testing.assert_array_equal(source.read("turned"), np.arange(6, dtype=np.float32).reshape(2, 3).T)
    assert source.info("d2t").dtype == np.int64 and source.info("t2d").dtype == np.bool_


class Evil:
    def __reduce__(self):
        return (os.mkdir, ("executed",))


def test_nothing_in_a_torch_file_is_executed(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Evil()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="weights_only"):
        open_tensors(tmp_path)
    assert not (tmp_path / "executed").exists()


def test_torch_files_that_are_something_else(tmp_path):
    torch = pytest.importorskip("torch")
    path = tmp_path / "pytorch_model.bin"
    for content, message in (
        ([torch.zeros(1)], "expected a dict of tensors"),
        ({"state": {"a": torch.zeros(1)}}, "'state' is dict: expected a flat dict"),
        ({"a": torch.zeros(1, dtype=torch.float8_e4m3fn)}, "a: torch.float8_e4m3fn"),
    ):
        torch.save(content, path)
        with pytest.raises(CheckpointError, match=message):
            open_tensors(path)
    raw = path.read_bytes()
    for cut in (b"", raw[:20], raw[: len(raw) // 2], b"\x80\x02garbage"):
        path.write_bytes(cut)
        with pytest.raises(CheckpointError, match=r"pytorch_model.bin"):
            open_tensors(path)


def test_without_torch_the_message_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    original = builtins.__import__

    def missing(name, *args, **kwargs):
        if name == "torch":
            raise ImportError("No module named 'torch'")
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(CheckpointError, match=r"pip install 'eagle-jax\[convert\]'"):
        open_tensors(tmp_path)
