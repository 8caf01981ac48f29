"""Writes small Hugging Face checkpoints of targets without torch or transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from eagle_jax.checkpoint.tensors import write_safetensors

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": 64,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def weights(
    config: dict[str, Any] = CONFIG, *, prefix: str = "model.", head: str = "lm_head.weight", dtype: Any = np.float32
) -> dict[str, np.ndarray]:
    """Random tensors of a llama, qwen2 or qwen3 model, as stored."""
    width, mlp, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (config["vocab_size"], width), "norm.weight": (width,)}
    for i in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm.weight": (width,),
            "self_attn.q_proj.weight": (queries, width),
            "self_attn.k_proj.weight": (keys, width),
            "self_attn.v_proj.weight": (keys, width),
            "self_attn.o_proj.weight": (width, queries),
            "post_attention_layernorm.weight": (width,),
            "mlp.gate_proj.weight": (mlp, width),
            "mlp.up_proj.weight": (mlp, width),
            "mlp.down_proj.weight": (width, mlp),
        }
        if config["model_type"] == "qwen2":
            layer |= {f"self_attn.{n}_proj.bias": (queries if n == "q" else keys,) for n in "qkv"}
        if config["model_type"] == "qwen3":
            layer |= {f"self_attn.{n}_norm.weight": (size,) for n in "qk"}
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    named = {prefix + name: shape for name, shape in shapes.items()}
    if not config["tie_word_embeddings"]:
        named[head] = shapes["embed_tokens.weight"]
    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape).astype(np.float32).astype(dtype) for name, shape in named.items()}


def write_folder(
    folder: Path, tensors: dict[str, np.ndarray], config: dict[str, Any] = CONFIG, shards: int = 1
) -> None:
    """config.json and the tensors, in one file or in shards with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        write_file(folder / "model.safetensors", tensors)
        return
    names = sorted(tensors)
    table = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in names[i::shards]}
        write_file(folder / file, part)
        table |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))


def write_file(path: Path, tensors: dict[str, np.ndarray]) -> None:
    write_safetensors(path, [(n, t.shape, t.dtype, lambda t=t: t) for n, t in tensors.items()])
