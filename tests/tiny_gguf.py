"""Writes small GGUF files as the usual converters do: q and k in rotary pairs for llama, weights quantised by rows."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import dequantize, quantize

WIDTH, MLP, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2", "Ċ Ġ", "Ċ ĊĠ", "Ġ Ġ"]
_LAYER = {
    "attn_norm": ("input_layernorm", (WIDTH,)),
    "attn_q": ("self_attn.q_proj", (WIDTH, WIDTH)),
    "attn_k": ("self_attn.k_proj", (WIDTH // HEADS * KV_HEADS, WIDTH)),
    "attn_v": ("self_attn.v_proj", (WIDTH // HEADS * KV_HEADS, WIDTH)),
    "attn_output": ("self_attn.o_proj", (WIDTH, WIDTH)),
    "ffn_norm": ("post_attention_layernorm", (WIDTH,)),
    "ffn_gate": ("mlp.gate_proj", (MLP, WIDTH)),
    "ffn_up": ("mlp.up_proj", (MLP, WIDTH)),
    "ffn_down": ("mlp.down_proj", (WIDTH, MLP)),
}


def byte_alphabet() -> list[str]:
    """The 256 characters that stand for bytes in a byte-level vocabulary."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    table = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    return [table[b] for b in range(256)]


def tokens() -> list[str]:
    made = [merge.replace(" ", "") for merge in MERGES if merge != "Ċ ĊĠ"]
    return SPECIAL + byte_alphabet() + made + ["ĊĊĠ", "<think>"]


def write_gguf(
    path: Path,
    architecture: str = "llama",
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    *,
    tied: bool = True,
    seed: int = 0,
    pre: str = "smollm",
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Writes a random model and returns what a reader must give: HF name -> float32 array.

    `metadata` adds or replaces keys (None removes one); `tensors` adds GGUF tensors.
    """
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, architecture)
    keys: dict[str, Any] = {
        f"{architecture}.block_count": LAYERS,
        f"{architecture}.context_length": 128,
        f"{architecture}.embedding_length": WIDTH,
        f"{architecture}.feed_forward_length": MLP,
        f"{architecture}.attention.head_count": HEADS,
        f"{architecture}.attention.head_count_kv": KV_HEADS,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 100000.0,
        f"{architecture}.rope.dimension_count": WIDTH // HEADS,
        f"{architecture}.vocab_size": len(tokens()),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens(),
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(tokens()) - len(SPECIAL) - 1) + [4],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    for key, value in (keys | (metadata or {})).items():
        _add(writer, key, value)
    expected = {}
    for stored, (name, shape) in _tensors(architecture, tied).items():
        weights = random.standard_normal(shape).astype(np.float32)
        weights = 1 + 0.1 * weights if len(shape) == 1 and stored.endswith("weight") else 0.2 * weights
        expected[name] = _write(writer, stored, weights, kind, architecture)
    for stored, weights in (tensors or {}).items():
        writer.add_tensor(stored, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def _tensors(architecture: str, tied: bool) -> dict[str, tuple[str, tuple[int, ...]]]:
    vocabulary = (len(tokens()), WIDTH)
    found = {"token_embd.weight": ("model.embed_tokens.weight", vocabulary)}
    for i in range(LAYERS):
        for part, (name, shape) in _LAYER.items():
            found[f"blk.{i}.{part}.weight"] = (f"model.layers.{i}.{name}.weight", shape)
            if architecture == "qwen2" and part in ("attn_q", "attn_k", "attn_v"):
                found[f"blk.{i}.{part}.bias"] = (f"model.layers.{i}.{name}.bias", shape[:1])
        if architecture == "qwen3":
            for part in "qk":
                name = f"model.layers.{i}.self_attn.{part}_norm.weight"
                found[f"blk.{i}.attn_{part}_norm.weight"] = (name, (WIDTH // HEADS,))
    found["output_norm.weight"] = ("model.norm.weight", (WIDTH,))
    if not tied:
        found["output.weight"] = ("lm_head.weight", vocabulary)
    return found


def _write(writer, stored: str, weights: np.ndarray, kind, architecture: str) -> np.ndarray:
    """Adds the tensor in the format's order and returns what dequantising gives, in HF's order."""
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(stored.split(".")[-2]) if architecture == "llama" else None
    if weights.ndim == 1:
        writer.add_tensor(stored, weights)
        return weights
    halves = (heads, 2, -1, WIDTH) if heads else None
    in_pairs = weights.reshape(halves).swapaxes(1, 2).reshape(weights.shape) if heads else weights
    data = quantize(in_pairs, kind)
    writer.add_tensor(stored, data, raw_dtype=kind)
    # A row is quantised by itself, so that the order of the rows does not matter.
    return dequantize(quantize(weights, kind), kind)


def _add(writer, key: str, value: Any) -> None:
    if value is None:
        return
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add.get(type(value), writer.add_array)(key, value)


assert set(string.printable) - set(byte_alphabet()) <= set(string.whitespace)
