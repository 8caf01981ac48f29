"""A small target with a tokenizer and a drafter for it, on disk, as the command line reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hf_folder
import numpy as np
from drafter_folders import drafter_config, flat_values, random_arrays, stored_arrays, write_folder
from tiny_gguf import CHAT_TEMPLATE, SPECIAL, byte_alphabet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCAB = len(SPECIAL) + 256
TARGET = hf_folder.CONFIG | {"vocab_size": VOCAB, "num_hidden_layers": 4}
DRAFTER = drafter_config(
    block={"hidden_size": 32, "head_dim": 8, "mlp_size": 48},
    target_hidden_size=32,
    vocab_size=VOCAB,
    draft_vocab_size=40,
    max_position=128,
    capture_layers=(1, 2, 3),
)
SWITCHES = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    "fc_norm": True,
    "norm_output": True,
}


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer: one token per byte, and the special tokens of the chat template."""
    vocabulary = {token: i for i, token in enumerate(SPECIAL + byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[2], "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def target_tensors() -> dict[str, np.ndarray]:
    return {name: array if array.ndim == 1 else array * 0.5 for name, array in hf_folder.weights(TARGET).items()}


def target_folder(folder: Path, tensors: dict[str, np.ndarray] | None = None, shards: int = 1, **changes: Any) -> Path:
    """A target; `changes` are keys of its config.json, `tensors` replace or add (None removes) some."""
    stored = {name: array for name, array in (target_tensors() | (tensors or {})).items() if array is not None}
    hf_folder.write_folder(folder, stored, TARGET | changes, shards)
    write_tokenizer(folder)
    return folder


def drafter_folder(folder: Path, tensors: dict[str, Any] | None = None, config=DRAFTER, **changes: Any) -> Path:
    """A drafter for it; `changes` are keys of its config.json and `tensors` replace or add some, None removing each."""
    stored = stored_arrays(config, random_arrays(config, 5)) | (tensors or {})
    stored = {name: array for name, array in stored.items() if array is not None}
    return write_folder(folder, flat_values(config, **(SWITCHES | changes)), stored)
