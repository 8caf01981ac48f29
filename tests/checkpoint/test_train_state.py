"""Checkpoints of a run: bit for bit, on any devices, never half a one, never another run's."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from eagle_jax.checkpoint.train_state import TrainCheckpoints, like
from eagle_jax.errors import CheckpointError, ConfigError
from eagle_jax.sharding import make_mesh
from eagle_jax.trainer.step import TrainState

ABOUT = {"drafter": {"width": 8}, "vocabulary": "abc"}
TRANSFORM = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


def fresh() -> TrainState:
    parameters = {"a.kernel": jnp.arange(64, dtype=jnp.float32).reshape(8, 8), "b.scale": jnp.ones(8)}
    return TrainState(jnp.int32(0), parameters, TRANSFORM.init(parameters))


@jax.jit
def step(state: TrainState) -> TrainState:
    gradients = jax.tree.map(lambda p: jnp.sin(p + state.step), state.parameters)
    updates, optimizer = TRANSFORM.update(gradients, state.optimizer, state.parameters)
    return TrainState(state.step + 1, optax.apply_updates(state.parameters, updates), optimizer)


def assert_equal(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and np.array_equal(x, y)


def after(steps: int) -> TrainState:
    state = fresh()
    for _ in range(steps):
        state = step(state)
    return state


def test_resuming_is_bit_exact(tmp_path):
    """Three steps, saved, restored, and three more equal six (B96)."""
    run = TrainCheckpoints(tmp_path / "run", ABOUT)
    run.save(3, after(3), {"position": 12})
    run.close()
    number, state, data = TrainCheckpoints(tmp_path / "run", ABOUT).restore(like(fresh()))
    assert (number, data) == (3, {"position": 12})
    for _ in range(3):
        state = step(state)
    assert_equal(state, after(6))


def test_a_saved_state_may_be_donated_at_once(tmp_path):
    """B109."""
    run = TrainCheckpoints(tmp_path, ABOUT)
    donating = jax.jit(step, donate_argnums=0)
    state = jax.tree.map(jnp.copy, after(1))
    run.save(1, state, None)
    for _ in range(3):
        state = donating(state)
    run.wait()
    assert_equal(run.restore(like(fresh()))[1], after(1))


def test_any_number_of_devices(tmp_path):
    run = TrainCheckpoints(tmp_path, ABOUT)
    spread = NamedSharding(make_mesh(1, 1, 8), PartitionSpec("fsdp"))
    state = jax.device_put(after(2), jax.tree.map(lambda leaf: spread if leaf.ndim else leaf.sharding, after(2)))
    run.save(2, state, None)
    run.wait()
    for devices in (1, 2, 8):
        mesh = make_mesh(1, 1, devices)
        wanted = jax.tree.map(lambda leaf, m=mesh: NamedSharding(m, PartitionSpec(*["fsdp"][: leaf.ndim])), state)
        restored = run.restore(like(state, wanted))[1]
        assert_equal(restored, after(2))
        assert len(restored.parameters["a.kernel"].sharding.device_set) == devices


def test_retention(tmp_path):
    run = TrainCheckpoints(tmp_path, ABOUT, keep=2)
    for number in (1, 2, 3):
        run.save(number, after(number), None)
    run.close()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.isdigit()) == ["2", "3"]


def test_another_configuration_is_named(tmp_path):
    run = TrainCheckpoints(tmp_path, ABOUT)
    run.save(1, after(1), None)
    run.close()
    other = TrainCheckpoints(tmp_path, ABOUT | {"vocabulary": "xyz"})
    with pytest.raises(ConfigError, match=r"step 1 is of another configuration.*vocabulary: 'abc', now 'xyz'"):
        other.restore(like(fresh()))


def test_nothing_to_restore(tmp_path):
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        TrainCheckpoints(tmp_path, ABOUT).restore(like(fresh()))


def test_a_damaged_checkpoint_is_one_line(tmp_path):
    run = TrainCheckpoints(tmp_path, ABOUT)
    run.save(1, after(1), None)
    run.close()
    for file in (tmp_path / "1" / "state").rglob("*"):
        if file.is_file() and file.stat().st_size:
            os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="step 1 cannot be read") as caught:
        TrainCheckpoints(tmp_path, ABOUT).restore(like(fresh()))
    assert "\n" not in str(caught.value)


def test_a_save_that_fails_is_an_error_and_never_the_latest(tmp_path):
    run = TrainCheckpoints(tmp_path, ABOUT)
    run.save(1, after(1), None)
    run.wait()
    with pytest.raises(CheckpointError, match=r"could not be saved|cannot be saved"):
        run.save(2, after(2), object())
        run.wait()  # it is written in the background
    assert TrainCheckpoints(tmp_path, ABOUT).latest == 1


def test_a_killed_process_leaves_no_half_checkpoint(tmp_path):
    """SIGKILL while checkpoints are being written one after another: the latest one is whole."""
    script = f"""
        import sys
        sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}
        import conftest, test_train_state as t
        run = t.TrainCheckpoints({str(tmp_path)!r}, t.ABOUT, keep=100)
        for number in range(1, 1000):
            run.save(number, t.after(1), number)
            print(number, flush=True)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if int(line) == 4:
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    run = TrainCheckpoints(tmp_path, ABOUT)
    assert run.latest is not None and run.latest >= 3
    number, state, data = run.restore(like(fresh()))
    assert data == number
    assert_equal(state, after(1))
