"""GGUF files seen as a Hugging Face checkpoint: the same tensor names and orientation, the same configuration keys."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from eagle_jax.checkpoint.gguf_file import GgufFile, GgufTensor
from eagle_jax.checkpoint.source import Index, TensorInfo, lookup
from eagle_jax.errors import CheckpointError

# Architecture -> whether the q and k rows are stored in rotary pairs instead of halves.
ARCHITECTURES = {"llama": True, "qwen2": False, "qwen3": False}

_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"
# The published Llama 3.1, 3.2 and 3.3 models; a file stores only the factors that follow from these.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class GgufSource:
    """A TensorSource over one .gguf file. Every tensor reads as float32, dequantised.

    Tensors whose name is not known keep their own name, so that a strict loader reports them.

    Raises:
      CheckpointError: the file is damaged, one of several parts, or of an architecture that is not supported.
    """

    def __init__(self, path: Path | str):
        self.file = GgufFile(Path(path))
        self.where = str(path)
        self.metadata = self.file.metadata
        if self.metadata.get("split.count", 1) not in (0, 1):
            raise CheckpointError(f"{path}: one part of a split file; merge the parts first (gguf-split --merge)")
        architecture = self.metadata.get("general.architecture")
        if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise CheckpointError(f"{path}: architecture {architecture!r} is not supported ({known})")
        self.architecture = architecture
        self._names: dict[str, str] = {}
        for stored in self.file.tensors:
            name = _hf_name(stored)
            if name in self._names:
                raise CheckpointError(f"{path}: both {self._names[name]} and {stored} would be {name}")
            self._names[name] = stored

    def keys(self) -> list[str]:
        return [name for name in self._names if name != ROPE_FACTORS]

    def info(self, name: str) -> TensorInfo:
        return TensorInfo(self._tensor(name).shape, np.dtype(np.float32), self.where)

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        tensor = self._tensor(name)
        index = (index or ()) + (slice(None),) * (len(tensor.shape) - len(index or ()))
        if len(tensor.shape) == 1:
            return self._dequantise(name, tensor, np.zeros(1, int))[0][index]
        if len(tensor.shape) > 2:
            raise CheckpointError(f"{self.where}: {name}: {len(tensor.shape)} dimensions, expected at most 2")
        rows = self._row_order(name, tensor)[index[0]]
        return self._dequantise(name, tensor, rows)[:, index[1]]

    def _tensor(self, name: str) -> GgufTensor:
        return self.file.tensors[lookup(self._names, name, self.where)]

    def _row_order(self, name: str, tensor: GgufTensor) -> np.ndarray:
        """Stored row of each HF row."""
        rows = np.arange(tensor.shape[0])
        heads = self._paired_heads(name)
        return rows if heads is None else _unpair(rows, heads, f"{self.where}: {name}")

    def _paired_heads(self, name: str) -> int | None:
        projection = re.search(r"self_attn\.([qk])_proj\.", name)
        if projection is None or not ARCHITECTURES[self.architecture]:
            return None
        heads = _Keys(self).int("attention.head_count")
        return heads if projection.group(1) == "q" else _Keys(self).int("attention.head_count_kv", heads)

    def _dequantise(self, name: str, tensor: GgufTensor, rows: np.ndarray) -> np.ndarray:
        """float32 [len(rows), last axis] of the named stored rows; for a vector, its only row."""
        if rows.size == 0:
            return np.zeros((0, tensor.shape[-1]), np.float32)
        first = int(rows.min())
        raw = self.file.read_rows(self._names[name], first, int(rows.max()) + 1)
        if tensor.kind == GGMLQuantizationType.F64:
            values = raw.view(np.float64).astype(np.float32)
        else:
            try:
                # Damaged scales may overflow; the loader refuses what is not finite, and names it.
                with np.errstate(all="ignore"):
                    values = dequantize(raw, tensor.kind)
            except (NotImplementedError, KeyError) as error:
                problem = f"{tensor.kind.name} weights cannot be dequantised"
                raise CheckpointError(f"{self.where}: {name}: {problem}") from error
        heads = self._paired_heads(name) if len(tensor.shape) == 1 else None
        if heads is not None:
            values = values[:, _unpair(np.arange(tensor.shape[0]), heads, f"{self.where}: {name}")]
        return values if np.array_equal(rows, np.arange(first, first + len(values))) else values[rows - first]


def read_config(source: GgufSource) -> dict[str, Any]:
    """The Hugging Face configuration that the metadata describes.

    Raises:
      CheckpointError: a missing, contradictory or unknown key of the architecture, by name.
    """
    keys = _Keys(source)
    names = set(source.file.tensors)
    hidden_size, num_heads = keys.int("embedding_length"), keys.int("attention.head_count")
    rotary_size = keys.int("rope.dimension_count", None)
    head_dim = keys.int("attention.key_length", rotary_size or hidden_size // max(num_heads, 1))
    for key, value in (
        ("rope.dimension_count", rotary_size),
        ("attention.value_length", keys.int("attention.value_length", None)),
    ):
        if value not in (None, head_dim):
            raise keys.fail(key, f"{value} differs from the head size {head_dim}, which is not supported")
    for key in ("expert_count", "expert_used_count"):
        if keys.int(key, 0):
            raise keys.fail(key, "mixtures of experts are not supported")
    max_position, base = keys.int("context_length"), keys.float("rope.freq_base", 10000.0)
    vocabulary = source.file.tensors.get("token_embd.weight")
    tokens = keys.take("tokenizer.ggml.tokens", (list,), None, prefixed=False)
    window = keys.int("attention.sliding_window", None)
    if window and source.architecture != "llama":
        raise keys.fail("attention.sliding_window", "a window is supported in the llama architecture only")
    config: dict[str, Any] = {
        "model_type": "mistral" if window else source.architecture,
        "hidden_size": hidden_size,
        "intermediate_size": keys.int("feed_forward_length"),
        "num_hidden_layers": keys.int("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.int("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": max_position,
        "rms_norm_eps": keys.float("attention.layer_norm_rms_epsilon"),
        "rope_theta": base,
        "vocab_size": keys.int("vocab_size", vocabulary.shape[0] if vocabulary else len(tokens or ())),
        "tie_word_embeddings": "output.weight" not in names,
        "bos_token_id": keys.take("tokenizer.ggml.bos_token_id", (int,), None, prefixed=False),
        "eos_token_id": _end_tokens(keys) or None,
    }
    if window:
        config["sliding_window"] = window
    if config["model_type"] == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in names
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in names
    if scaling := _rope_scaling(keys, source, base, head_dim, max_position):
        config["rope_scaling"] = scaling
    keys.finish()
    return config


def _end_tokens(keys: _Keys) -> list[int]:
    """End of text, of turn and of message: each ends an answer."""
    names = ("eos", "eot", "eom")
    ids = [keys.take(f"tokenizer.ggml.{name}_token_id", (int,), None, prefixed=False) for name in names]
    return list(dict.fromkeys(i for i in ids if i is not None))


def _rope_scaling(
    keys: _Keys, source: GgufSource, base: float, head_dim: int, max_position: int
) -> dict[str, Any] | None:
    kind = keys.take("rope.scaling.type", (str,), "none")
    keys.take("rope.scaling.finetuned", (bool,), None)
    factor = keys.float("rope.scaling.factor", 1.0)
    original = keys.int("rope.scaling.original_context_length", None)
    attention_factor = keys.float("rope.scaling.attn_factor", 1.0)
    beta_fast = keys.float("rope.scaling.yarn_beta_fast", 32.0)
    beta_slow = keys.float("rope.scaling.yarn_beta_slow", 1.0)
    if attention_factor != 1.0:
        raise keys.fail("rope.scaling.attn_factor", f"{attention_factor} is not supported (1)")
    if ROPE_FACTORS in source.file.tensors:
        if kind != "none":
            raise keys.fail("rope.scaling.type", f"{kind!r} together with the tensor {ROPE_FACTORS} is not supported")
        return _llama3_scaling(source, base, head_dim)
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original or max_position,
            "beta_fast": beta_fast,
            "beta_slow": beta_slow,
        }
    raise keys.fail("rope.scaling.type", f"{kind!r} is not supported (none, linear, yarn)")


def _llama3_scaling(source: GgufSource, base: float, head_dim: int) -> dict[str, Any] | None:
    """Llama 3's parameters, recovered from the divisors of the frequencies that a file stores instead of them."""
    stored = source.read(ROPE_FACTORS)
    if stored.shape == (head_dim // 2,) and np.isfinite(stored).all():
        if (stored == 1).all():
            return None
        factor = float(stored.max())
        low, high, original = _LLAMA3.values()
        wavelength = 2 * math.pi * base ** (np.arange(head_dim // 2) * 2 / head_dim)
        ramp = np.clip((original / wavelength - low) / (high - low), 0, 1)
        if np.allclose(stored, 1 / ((1 - ramp) / factor + ramp), rtol=1e-4):
            return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    raise CheckpointError(
        f"{source.where}: {ROPE_FACTORS}: these rotary factors are not Llama 3's (low 1, high 4, length 8192); no "
        "other kind is supported"
    )


class _Keys:
    """Metadata by name; the architecture's own keys are refused when nobody asked for them."""

    def __init__(self, source: GgufSource):
        self._metadata, self._where = source.metadata, source.where
        self._prefix = f"{source.architecture}."
        self._seen: set[str] = set()

    def fail(self, key: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._where}: {self._prefix}{key}: {problem}")

    def take(self, key: str, kinds: tuple[type, ...], default: Any = ..., prefixed: bool = True) -> Any:
        full = self._prefix + key if prefixed else key
        self._seen.add(full)
        value = self._metadata.get(full)
        if isinstance(value, list) and list not in kinds:  # one value per layer
            if len(set(value)) != 1:
                raise CheckpointError(f"{self._where}: {full}: layers that differ ({value[:8]}...) are not supported")
            value = value[0]
        if value is None:
            if default is ...:
                raise CheckpointError(f"{self._where}: {full}: missing")
            return default
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise CheckpointError(f"{self._where}: {full}: expected {wanted}, found {value!r}")
        return value

    def int(self, key: str, default: Any = ...) -> Any:
        return self.take(key, (int,), default)

    def float(self, key: str, default: Any = ...) -> Any:
        """The shortest decimal that is the stored float32: 9.99999974e-06 was written as 1e-05."""
        value = self.take(key, (float, int), default)
        return value if value is default or not math.isfinite(value) else float(str(np.float32(value)))

    def finish(self) -> None:
        left = sorted(key for key in self._metadata if key.startswith(self._prefix) and key not in self._seen)
        if left:
            raise CheckpointError(
                f"{self._where}: unknown metadata {left}: nobody handles these keys, so they could change the model"
            )


def _hf_name(stored: str) -> str:
    if layer := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", stored):
        number, part, suffix = layer.groups()
        return f"model.layers.{number}.{_LAYER[part]}.{suffix}" if part in _LAYER else stored
    part, _, suffix = stored.rpartition(".")
    return f"{_WHOLE[part]}.{suffix}" if part in _WHOLE else stored


def _unpair(rows: np.ndarray, heads: int, where: str) -> np.ndarray:
    """Stored position of each HF row of q or k: pairs (x0, y0, x1, y1 ...) per head back to halves (x..., y...)."""
    if heads < 1 or rows.size % (2 * heads):
        raise CheckpointError(f"{where}: {rows.size} rows are not {heads} heads of an even size")
    return rows.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
