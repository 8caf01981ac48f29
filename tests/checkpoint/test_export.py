"""Writing drafters: complete and compared, or not there at all."""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from drafter_folders import drafter_config, random_arrays
from jax.sharding import NamedSharding, PartitionSpec

from eagle_jax.checkpoint import export
from eagle_jax.checkpoint.drafter_checkpoint import DrafterCheckpoint, open_drafter
from eagle_jax.checkpoint.export import export_drafter
from eagle_jax.checkpoint.layouts import LAYOUTS, WRITABLE
from eagle_jax.errors import CheckpointError, ConfigError

CONFIG = drafter_config()
ARRAYS = random_arrays(CONFIG)
DRAFTER = DrafterCheckpoint.from_arrays(CONFIG, ARRAYS)


def other_drafter(folder):
    export_drafter(DrafterCheckpoint.from_arrays(CONFIG, random_arrays(CONFIG, 9)), folder, "vllm")
    return contents(folder)


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_only_weights_and_configuration_are_written(tmp_path):
    other_drafter(tmp_path / "source")
    (tmp_path / "source/modeling_drafter.py").write_text("raise SystemExit")
    export_drafter(open_drafter(tmp_path / "source"), tmp_path / "deep/er/out", "sglang")
    assert sorted(os.listdir(tmp_path / "deep/er/out")) == ["config.json", "model.safetensors"]
    assert os.listdir(tmp_path / "deep/er") == ["out"]


def test_an_occupied_destination(tmp_path):
    before = other_drafter(tmp_path / "out")
    with pytest.raises(CheckpointError, match="exists already"):
        export_drafter(DRAFTER, tmp_path / "out", "vllm")
    assert contents(tmp_path / "out") == before
    export_drafter(DRAFTER, tmp_path / "out", "safeailab", overwrite=True)
    assert open_drafter(tmp_path / "out").layout == "safeailab"
    assert os.listdir(tmp_path) == ["out"]
    (tmp_path / "empty").mkdir()
    export_drafter(DRAFTER, tmp_path / "empty", "vllm")


def test_what_is_no_drafter_is_never_overwritten(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home/thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("x")
    for name in ("home", "file"):
        with pytest.raises(CheckpointError, match="not a drafter"):
            export_drafter(DRAFTER, tmp_path / name, "vllm", overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["file", "home"]


FULL_DISK = OSError(28, "No space left on device")
ANY_CALL = lambda *args: True  # noqa: E731


def fail_at(monkeypatch, owner, name, at, error, counts=ANY_CALL):
    """Makes call number `at` of `owner.name` raise; calls for which `counts` is false pass and are not counted."""
    original, calls = getattr(owner, name), itertools.count()

    def replacement(*args, **kwargs):
        if counts(*args) and next(calls) == at:
            raise error
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, replacement)


@pytest.mark.parametrize("layout", ["vllm", "orbax"])
@pytest.mark.parametrize("occupied", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), FULL_DISK], ids=["ctrl-c", "full-disk"])
@pytest.mark.parametrize(
    ("owner", "name", "at"),
    [
        (export.tempfile, "mkdtemp", 0),
        (export.json, "dump", 0),
        (export, "_compare", 0),
        (export, "sync_folder", 0),
        (export.os, "rename", 0),
        (export.os, "rename", 1),
        (DrafterCheckpoint, "read", 3),
    ],
)
def test_a_failure_at_any_moment_leaves_what_was_there(tmp_path, monkeypatch, layout, occupied, error, owner, name, at):
    before = other_drafter(tmp_path / "out") if occupied else {}
    if (name, at, occupied) == ("rename", 1, False):
        pytest.skip("nothing has to move away")

    def concerns_destination(a, b):  # Orbax renames files of its own
        return tmp_path / "out" in (Path(a), Path(b))

    fail_at(monkeypatch, owner, name, at, error, concerns_destination if name == "rename" else ANY_CALL)
    expected = CheckpointError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected) as caught:
        export_drafter(DRAFTER, tmp_path / "out", layout, overwrite=True)
    if expected is CheckpointError:
        assert "No space left on device" in str(caught.value)
    if name == "sync_folder":  # the new drafter stands complete under its name already
        assert open_drafter(tmp_path / "out").config == CONFIG
        return
    assert os.listdir(tmp_path) == (["out"] if occupied else [])
    assert contents(tmp_path / "out") == before


def test_a_killed_process_leaves_no_destination(tmp_path):
    """Nothing can clean up after SIGKILL; what matters is that no half drafter stands under the name."""
    program = f"""
        import os, sys
        sys.path[:0] = {sys.path!r}
        from test_export import DRAFTER, export_drafter
        from eagle_jax.checkpoint.drafter_checkpoint import DrafterCheckpoint
        read, count = DrafterCheckpoint.read, iter(range(99))
        def dying(*args):
            if next(count) == 7:
                os.kill(os.getpid(), 9)
            return read(*args)
        DrafterCheckpoint.read = dying
        export_drafter(DRAFTER, {str(tmp_path / "out")!r}, "vllm")
    """
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env=environment, capture_output=True)
    assert done.returncode == -9, done.stderr
    assert not (tmp_path / "out").exists()
    assert all(name.startswith(".out.") for name in os.listdir(tmp_path))
    export_drafter(DRAFTER, tmp_path / "out", "vllm")


def test_a_disk_that_returns_other_bytes_is_noticed(tmp_path, monkeypatch):
    layout = LAYOUTS["vllm"]

    def save(folder, entries):
        layout.save(folder, entries)
        raw = bytearray((folder / "model.safetensors").read_bytes())
        raw[8 + int.from_bytes(raw[:8], "little") + 8 * 8 + 10] ^= 1  # in the first weights behind d2t
        (folder / "model.safetensors").write_bytes(raw)

    monkeypatch.setitem(LAYOUTS, "vllm", dataclasses.replace(layout, save=save))
    with pytest.raises(CheckpointError, match="reads back differently"):
        export_drafter(DRAFTER, tmp_path / "out", "vllm")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("layout", WRITABLE)
def test_dtypes(tmp_path, layout):
    export_drafter(DRAFTER, tmp_path / "out", layout, dtype="bfloat16")
    found = open_drafter(tmp_path / "out")
    for path, array in ARRAYS.items():
        expected = array if path == "draft_to_target" else array.astype(ml_dtypes.bfloat16)
        assert found.read(path).tobytes() == expected.tobytes()
    values = json.loads((tmp_path / "out/config.json").read_text())
    assert values.get("torch_dtype") == (None if layout == "orbax" else "bfloat16")


def test_values_beyond_a_dtype(tmp_path):
    arrays = ARRAYS | {"norm.scale": np.full(16, 1e5, np.float32)}
    drafter = DrafterCheckpoint.from_arrays(CONFIG, arrays)
    with pytest.raises(CheckpointError, match=r"norm.scale: holds values beyond the range of float16"):
        export_drafter(drafter, tmp_path / "out", "vllm", dtype="float16")
    with pytest.raises(ConfigError, match="dtype 'int8' is not supported"):
        export_drafter(DRAFTER, tmp_path / "out", "vllm", dtype="int8")
    with pytest.raises(CheckpointError, match="cannot write layout 'torchspec'"):
        export_drafter(DRAFTER, tmp_path / "out", "torchspec")
    assert os.listdir(tmp_path) == []


def test_nan_is_not_exported(tmp_path):
    drafter = DrafterCheckpoint.from_arrays(CONFIG, ARRAYS | {"norm.scale": np.full(16, np.nan, np.float32)})
    with pytest.raises(CheckpointError, match=r"NaN or infinite weights in norm.scale"):
        export_drafter(drafter, tmp_path / "out", "vllm")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm.scale": None}, "missing: norm.scale"),
        ({"extra": np.zeros(1, np.float32)}, "unknown: extra"),
        ({"norm.scale": np.zeros(3, np.float32)}, "norm.scale is .3., the configuration wants .16."),
        ({"draft_to_target": np.arange(8, dtype=np.float32)}, "expected integers"),
        ({"draft_to_target": np.arange(8, dtype=np.int32)[::-1]}, "ascend strictly"),
        ({"draft_to_target": np.arange(20, 28, dtype=np.int32)}, "outside"),
    ],
)
def test_arrays_that_are_not_the_drafter(change, message):
    arrays = {path: array for path, array in (ARRAYS | change).items() if array is not None}
    with pytest.raises(CheckpointError, match=message):
        DrafterCheckpoint.from_arrays(CONFIG, arrays)


def test_jax_arrays(tmp_path):
    arrays = {path: jnp.asarray(array, array.dtype) for path, array in ARRAYS.items()}
    arrays["fc.kernel"] = arrays["fc.kernel"].astype(jnp.bfloat16)
    export_drafter(DrafterCheckpoint.from_arrays(CONFIG, arrays), tmp_path / "out", "vllm")
    found = open_drafter(tmp_path / "out")
    assert found.info("fc.kernel").dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(found.read("fc.kernel"), ARRAYS["fc.kernel"].astype(ml_dtypes.bfloat16))


def test_orbax_arrays_restore_onto_a_mesh(tmp_path):
    import orbax.checkpoint as ocp

    export_drafter(DRAFTER, tmp_path / "out", "orbax")
    mesh = jax.make_mesh((len(jax.devices()),), ("tensor",))
    spread = NamedSharding(mesh, PartitionSpec("tensor"))
    wanted = {
        path: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=spread)
        for path, array in ARRAYS.items()
        if array.shape[0] % mesh.size == 0
    }
    with ocp.PyTreeCheckpointer() as reader:
        restored = reader.restore(
            tmp_path / "out/arrays",
            args=ocp.args.PyTreeRestore(
                item=wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted), partial_restore=True
            ),
        )
    assert "fc.kernel" in restored
    for path, array in restored.items():
        assert array.sharding == spread
        np.testing.assert_array_equal(array, ARRAYS[path])


@pytest.mark.parametrize("damage", ["remove", "truncate"])
def test_damaged_orbax_folders(tmp_path, damage):
    export_drafter(DRAFTER, tmp_path / "out", "orbax")
    files = [path for path in (tmp_path / "out/arrays").rglob("*") if path.is_file()]
    for path in files:
        if damage == "remove":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(CheckpointError, match=r"Orbax cannot read it|missing"):
        found = open_drafter(tmp_path / "out")
        for path in found.keys():  # noqa: SIM118 (not a dict)
            found.read(path)


def test_orbax_configurations_are_strict(tmp_path):
    export_drafter(DRAFTER, tmp_path / "out", "orbax")
    where = tmp_path / "out/config.json"
    good = json.loads(where.read_text())
    for change, message in (
        ({"extra": 1}, "unknown keys"),
        ({"num_layers": "1"}, "num_layers: expected int"),
        ({"num_layers": 2}, "holds 1 blocks"),
        ({"fc_norm": None}, "fc_norm: missing"),
        ({"capture_layers": [1, "2", 3]}, "capture_layers"),
        ({"draft_vocab_size": 99}, "exceeds vocab_size"),
        ({"block": good["config"]["block"] | {"activation": "relu"}}, "'relu' is not supported"),
    ):
        where.write_text(json.dumps(good | {"config": good["config"] | change}))
        with pytest.raises((CheckpointError, ConfigError), match=message):
            open_drafter(tmp_path / "out")
    where.write_text(json.dumps(good | {"version": 2}))
    with pytest.raises(ConfigError, match="version"):
        open_drafter(tmp_path / "out")
