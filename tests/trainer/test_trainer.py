"""Whole runs of a tiny recipe: what they leave, how they end, and that a resumed one is the one never stopped."""

import dataclasses
import json
import os
import signal

import hf_folder
import numpy as np
import pytest
import yaml
from rich.console import Console

from eagle_jax.checkpoint.drafter_checkpoint import open_drafter
from eagle_jax.checkpoint.load import load_drafter, load_target
from eagle_jax.errors import ConfigError, InputError
from eagle_jax.generation import Generator
from eagle_jax.trainer.config import read_config
from eagle_jax.trainer.setup import prepare
from eagle_jax.trainer.trainer import HeldOut, Trainer, TrainingError

SIZES = hf_folder.CONFIG | {"num_hidden_layers": 8}
VOCAB = SIZES["vocab_size"]
TOTAL = 6
RECIPE = {
    "drafter": {"version": "3.1"},
    "data": {"train": "unused", "length": 32, "rows": 2},
    "loss": {"steps": 2, "remat": False, "block": 32},
    "optimizer": {"total_steps": TOTAL, "learning_rate": 3e-3, "warmup_steps": 2},
    "save_every": 2,
    "evaluate_every": 3,
    "log_every": 1,
    "export": ["vllm", "orbax"],
}
QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    hf_folder.write_folder(folder, hf_folder.weights(SIZES), SIZES)
    return folder


class RandomRows:
    """Batches that depend on their number only; `at` runs before a numbered batch is given."""

    def __init__(self, at: dict | None = None):
        self.given, self._at = 0, at or {}

    def __next__(self):
        self.given += 1
        self._at.get(self.given, lambda: None)()
        return batch(self.given)

    def get_state(self):
        return {"given": self.given}

    def set_state(self, state):
        self.given = state["given"]


def batch(number: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(number)
    shape = (2, 32)
    positions = np.broadcast_to(np.arange(32), shape).astype(np.int32)
    tokens = rng.integers(3, VOCAB, shape).astype(np.int32)
    return {
        "tokens": tokens,
        "mask": np.ones(shape, bool),
        "documents": np.ones(shape, np.int32),
        "positions": positions,
    }


def recipe(folder, target_folder, *overrides: str):
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(RECIPE | {"target": str(target_folder), "run": str(folder / "run")}))
    return read_config(path, overrides)


VOCABULARY = np.arange(0, VOCAB, 2)
HELD_OUT = HeldOut([batch(1000)], [[5, 9, 3], [7]], max_new_tokens=8)


def start(config, rows, held_out=None) -> Trainer:
    return Trainer(prepare(config, VOCABULARY), rows, held_out, QUIET)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, target_folder):
    folder = tmp_path_factory.mktemp("whole")
    config = recipe(folder, target_folder)
    return config, start(config, RandomRows(), HELD_OUT).run({"train": "abc"})


def arrays(folder) -> dict[str, np.ndarray]:
    drafter = open_drafter(folder)
    return {path: drafter.read(path) for path in drafter.keys()}  # noqa: SIM118


def test_what_a_run_leaves(whole, target_folder):
    config, outcome = whole
    assert (outcome.step, outcome.finished) == (TOTAL, True)
    lines = [json.loads(line) for line in (config.run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(1, TOTAL + 1))
    held_out = [line for line in lines if line["kind"] == "evaluate"]
    assert [line["step"] for line in held_out] == [3, 6]
    assert held_out[-1]["decoded_acceptance_length"] >= 1 and len(held_out[-1]["decoded_acceptance"]) == 2
    assert yaml.safe_load((config.run / "config.yaml").read_text())["data"]["length"] == 32
    about = json.loads((config.run / "run.json").read_text())
    assert about["data"] == {"train": "abc"} and "jax" in about["versions"]
    assert (config.run / "curves.png").stat().st_size > 10_000
    assert any((config.run / "tensorboard").iterdir())


def test_the_exported_drafter_decodes(whole, target_folder):
    """It is read back through a layout, drafts for the target, and the output is the target's."""
    outcome = whole[1]
    assert [folder.name for folder in outcome.exported] == ["vllm", "orbax"]
    for path, array in arrays(outcome.exported[0]).items():
        assert np.array_equal(array, arrays(outcome.exported[1])[path])
    target = load_target(target_folder)
    drafter = load_drafter(outcome.exported[0], target)
    assert drafter.config.fc_norm and drafter.config.norm_output and not drafter.warnings
    plain, ours = (
        Generator(target.model, model).generate(HELD_OUT.prompts, max_new_tokens=8, eos_token_ids=())
        for model in (None, drafter.model)
    )
    assert [row.tokens for row in ours.rows] == [row.tokens for row in plain.rows]


def test_a_terminated_run_resumes_as_if_never_stopped(whole, tmp_path, target_folder):
    """SIGTERM saves after the step in progress; the second start ends with the same bits (B96)."""
    config, at = recipe(tmp_path, target_folder), 3
    first = start(config, RandomRows({at: lambda: os.kill(os.getpid(), signal.SIGTERM)})).run()
    assert (first.step, first.finished, first.exported) == (at, False, [])
    second = start(config, RandomRows()).run()
    assert (second.step, second.finished) == (TOTAL, True)
    for path, array in arrays(whole[1].exported[0]).items():
        assert np.array_equal(array, arrays(second.exported[0])[path]), path
    lines = [json.loads(line)["step"] for line in (config.run / "metrics.jsonl").read_text().splitlines()]
    assert lines == list(range(1, TOTAL + 1))


def test_a_batch_that_breaks_ends_the_run_and_is_named(tmp_path, target_folder):
    """Nothing is saved from the step on; what was saved before resumes."""
    config = recipe(tmp_path, target_folder)
    setup = prepare(config, VOCABULARY)
    broken = dataclasses.replace(setup.frozen, embed=setup.frozen.embed.at[:].set(np.nan))
    trainer = Trainer(dataclasses.replace(setup, frozen=broken), RandomRows(), None, QUIET)
    with pytest.raises(TrainingError, match=r"step 1: the loss .* is not finite.*batch is number 1 "):
        trainer.run()
    assert not [path for path in (config.run / "checkpoints").iterdir() if path.name.isdigit()]


def test_another_recipe_in_the_same_folder_is_refused(whole, tmp_path, target_folder):
    config = recipe(tmp_path, target_folder)
    start(config, RandomRows({1: lambda: os.kill(os.getpid(), signal.SIGTERM)})).run()
    other = recipe(tmp_path, target_folder, "drafter.version=3")
    with pytest.raises(ConfigError, match=r"of another configuration .*drafter"):
        start(other, RandomRows()).run()


def test_a_warm_start_keeps_its_vocabulary(whole, tmp_path, target_folder):
    """B15: the table goes with the head that was trained for it."""
    exported = whole[1].exported[0]
    config = recipe(tmp_path, target_folder, f"drafter.start_from={exported}")
    setup = prepare(config, None)
    assert np.array_equal(setup.frozen.parameters["draft_to_target"], VOCABULARY)
    with pytest.raises(ConfigError, match="has a draft vocabulary of its own"):
        prepare(config, np.arange(8))


@pytest.mark.parametrize(
    "override, message",
    [
        ("data.lenght=3", "data.lenght: Extra inputs are not permitted"),
        ("loss.steps=0", "loss.steps: Input should be greater than or equal to 1"),
        ("loss.kind=mse", "loss.kind: Input should be 'kl', 'ce', 'lk-alpha' or 'lk-lambda'"),
        ("optimizer.learning_rate=fast", "optimizer.learning_rate: Input should be a valid number"),
        ("mesh.fsdp=4", r"data.rows \(2\) is not a multiple"),
    ],
)
def test_recipes_are_strict(tmp_path, target_folder, override, message):
    with pytest.raises(ConfigError, match=message) as caught:
        recipe(tmp_path, target_folder, override)
    assert "\n" not in str(caught.value)


def test_recipes_that_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match="cannot read"):
        read_config(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(InputError, match="not YAML"):
        read_config(tmp_path / "bad.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ConfigError, match="expected sections"):
        read_config(tmp_path / "list.yaml")


def test_captured_layers_the_target_lacks(tmp_path, target_folder):
    config = recipe(tmp_path, target_folder, "drafter.capture_layers=[2, 3, 9]")
    with pytest.raises(ConfigError, match="leave"):
        prepare(config, None)
