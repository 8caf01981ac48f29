"""Small drafters on disk, for tests of what reads and writes them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny import block_config

from eagle_jax.checkpoint.drafter_checkpoint import open_drafter
from eagle_jax.checkpoint.layouts.base import DRAFT_TO_TARGET, drafter_shapes
from eagle_jax.config import DrafterConfig
from eagle_jax.errors import EagleJaxError

SHARED_DRAFTERS = Path(__file__).parents[2] / "shared" / "drafters"


def drafter_config(*, block: dict | None = None, **changes) -> DrafterConfig:
    """An EAGLE-3.1 drafter with a vocabulary of 8 out of 24."""
    sizes = {"hidden_size": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "mlp_size": 20}
    fields = {
        "block": block_config(**(sizes | (block or {}))),
        "num_layers": 1,
        "target_hidden_size": 16,
        "vocab_size": 24,
        "draft_vocab_size": 8,
        "max_position": 64,
        "capture_layers": (2, 3, 5),
        "num_captured": 3,
        "fc_norm": True,
        "norm_before_fc": False,
        "norm_output": True,
        "norm_before_residual": False,
        "fc_bias": False,
        "own_embedding": False,
        "own_head": True,
    }
    return DrafterConfig(**(fields | changes))


def random_arrays(config: DrafterConfig, seed: int = 0, dtype=np.float32) -> dict[str, np.ndarray]:
    """Canonical path -> array."""
    random = np.random.default_rng(seed)
    arrays = {path: random.standard_normal(shape).astype(dtype) for path, shape in drafter_shapes(config).items()}
    if DRAFT_TO_TARGET in arrays:
        ids = random.choice(config.vocab_size, config.draft_vocab_size, replace=False)
        arrays[DRAFT_TO_TARGET] = np.sort(ids).astype(np.int32)
    return arrays


def stored_arrays(config: DrafterConfig, arrays: dict[str, np.ndarray], layer: str = "midlayer.", prefix: str = ""):
    """Stored name -> array, spelled out here so that tests do not lean on the layout tables.

    `layer` stands for `layers.0.`; later blocks are `layers.N.`.
    """
    stored = {}
    for path, array in arrays.items():
        if path == DRAFT_TO_TARGET:
            stored["d2t"] = array.astype(np.int64) - np.arange(len(array))
            stored["t2d"] = np.isin(np.arange(config.vocab_size), array)
            continue
        if path == "fc_norm.scale":
            stored |= {f"{prefix}fc_norm.{i}.weight": row for i, row in enumerate(array)}
            continue
        if path.endswith(".kernel"):
            array = np.ascontiguousarray(array.T)
        name = path.replace(".kernel", ".weight").replace(".scale", ".weight").replace("embed.", "embed_tokens.")
        if name.startswith("layers.0."):
            name = layer + name.removeprefix("layers.0.")
        stored[name if name == "lm_head.weight" else prefix + name] = array
    return stored


def flat_values(config: DrafterConfig, **changes) -> dict:
    """The flat config.json of a plain Llama-shaped drafter, with no EAGLE-3 switch; `None` in changes removes a key."""
    block = config.block
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": block.hidden_size,
        "intermediate_size": block.mlp_size,
        "num_attention_heads": block.num_heads,
        "num_key_value_heads": block.num_kv_heads,
        "head_dim": block.head_dim,
        "num_hidden_layers": config.num_layers,
        "rms_norm_eps": block.norm_eps,
        "max_position_embeddings": config.max_position,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "hidden_act": "silu",
        "torch_dtype": "float16",
        "use_cache": True,
    }
    return {key: value for key, value in (values | changes).items() if value is not None}


def write_folder(folder: Path, values: dict, stored: dict[str, np.ndarray]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    save_file(stored, folder / "model.safetensors")
    return folder


PLAIN = drafter_config(fc_norm=False, norm_output=False)
PLAIN_ARRAYS = random_arrays(PLAIN, 3)
PLAIN_STORED = stored_arrays(PLAIN, PLAIN_ARRAYS)
IDS = {"eagle_aux_hidden_state_layer_ids": [2, 3, 5]}


def plain_folder(folder: Path, changes: dict | None = None, tensors: dict | None = None, drop=()) -> Path:
    """A good EAGLE-3 folder with these keys changed (None removes), tensors changed or added, and tensors dropped."""
    stored = {name: array for name, array in (PLAIN_STORED | (tensors or {})).items() if name not in drop}
    served = {"architectures": ["LlamaForCausalLMEagle3"]}
    return write_folder(folder / "drafter", flat_values(PLAIN, **(IDS | served | (changes or {}))), stored)


def refuse(folder: Path, *words: str) -> None:
    """Asserts that the folder is refused in one line that names it and holds these words."""
    with pytest.raises(EagleJaxError) as caught:
        open_drafter(folder)
    message = str(caught.value)
    assert "\n" not in message and str(folder) in message
    for word in words:
        assert word in message, message
