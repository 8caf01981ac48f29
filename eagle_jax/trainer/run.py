"""`eagle-jax train`: a recipe and prepared data in, a trained and exported drafter out."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import numpy as np
from rich.console import Console

from eagle_jax.checkpoint.load import read_target
from eagle_jax.data import vocabulary
from eagle_jax.data.prepared import PreparedData
from eagle_jax.data.training_rows import training_rows
from eagle_jax.errors import InputError
from eagle_jax.trainer.config import TrainConfig
from eagle_jax.trainer.setup import Setup, prepare
from eagle_jax.trainer.trainer import HeldOut, Outcome, Trainer

EVALUATION_BATCHES = 16
EVALUATION_PROMPTS = 8


def train(config: TrainConfig, console: Console) -> Outcome:
    """Runs a recipe, from its latest checkpoint where there is one.

    Raises:
      EagleJaxError: a recipe, target, vocabulary or data that do not fit together; a run that cannot go on.
    """
    path = config.drafter.vocabulary
    draft_vocabulary = None
    if path is not None:
        draft_vocabulary = vocabulary.load(path, vocab_size=read_target(config.target).vocab_size)
    with console.status(f"Loading {config.target}"):
        setup = prepare(config, None if draft_vocabulary is None else draft_vocabulary.ids)
        data = PreparedData(config.data.train, setup.target.tokenizer)
    rows = training_rows(
        config.data.train,
        length=config.data.length,
        batch_size=config.data.rows,
        seed=config.data.seed,
        shard_index=jax.process_index(),
        shard_count=jax.process_count(),
    )
    described: dict[str, Any] = {"train": data.fingerprint}
    if draft_vocabulary is not None:
        described |= {"vocabulary": draft_vocabulary.fingerprint, "coverage": draft_vocabulary.coverage}
    held_out = None
    if config.data.evaluate is not None:
        held_out_data = PreparedData(config.data.evaluate, setup.target.tokenizer)
        described["evaluate"] = held_out_data.fingerprint
        held_out = _held_out(setup, held_out_data)
    return Trainer(setup, rows, held_out, console).run(described)


def _held_out(setup: Setup, data: PreparedData) -> HeldOut:
    """The first packed rows, and the first prompts for the decode loop."""
    config = setup.config.data
    rows = training_rows(
        data.folder,
        length=config.length,
        batch_size=config.rows,
        seed=0,
        shard_index=jax.process_index(),
        shard_count=jax.process_count(),
        num_epochs=1,
    )
    batches = list(itertools.islice(rows, EVALUATION_BATCHES))
    if not batches:
        raise InputError(
            f"{data.folder}: holds less than one batch of {config.rows} rows of {config.length} tokens to evaluate on"
        )
    prompts = []
    for i in range(min(len(data), EVALUATION_PROMPTS)):
        record = data[i]
        prompts.append(record["tokens"][: int(np.argmax(record["mask"]))].tolist())
    return HeldOut(batches, [prompt for prompt in prompts if prompt])
