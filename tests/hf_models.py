"""Tiny random `transformers` models on disk, and the same models as our Decoder."""

import dataclasses
import functools
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from canonical import set_parameters
from flax import nnx
from safetensors.numpy import load_file

from eagle_jax.layers import cache as kv_cache
from eagle_jax.records import KVCache
from eagle_jax.target import read_target_config
from eagle_jax.target.decoder import Decoder

torch = pytest.importorskip("torch")  # a test module that imports this one is skipped where torch is absent
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 47,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}


@dataclasses.dataclass(frozen=True)
class Reference:
    """What transformers says about one sequence.

    logits: [T, V]; boundaries: [L + 1, T, D], the stream entering each block and after the last one; hidden: [T, D],
    after the final norm.
    """

    logits: np.ndarray
    boundaries: np.ndarray
    hidden: np.ndarray


def make(family: str, seed: int = 0, **fields):
    """A model of `family` ("Llama", "Qwen3", ...) whose every parameter is random, norms and biases included."""
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **fields})
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.3 * noise)
            else:
                parameter.copy_(noise * (parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 0.3))
    return model


def reference(model, tokens: np.ndarray) -> Reference:
    """One uncached forward pass over tokens [T]."""
    before_norm = []
    hook = model.model.norm.register_forward_hook(lambda _module, inputs, _output: before_norm.append(inputs[0]))
    with torch.no_grad():
        out = model(torch.as_tensor(tokens)[None], output_hidden_states=True, use_cache=False)
    hook.remove()
    *streams, hidden = out.hidden_states  # transformers' last one is already normed
    return Reference(
        logits=out.logits[0].numpy(),
        boundaries=torch.cat([*streams, before_norm[0]]).numpy(),
        hidden=hidden[0].numpy(),
    )


def rotary_tables(parameters: dict, head_dim: int, max_position: int, positions: np.ndarray):
    """([h / 2] frequencies, factor, cos [T, h / 2], sin [T, h / 2]) of `rope_parameters` at positions [T]."""
    config = transformers.LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        max_position_embeddings=max_position,
        rope_parameters=dict(parameters),
    )
    module = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    cos, sin = module(torch.zeros(1), torch.as_tensor(positions)[None])
    half = head_dim // 2
    return module.inv_freq.numpy(), module.attention_scaling, cos[0, :, :half].numpy(), sin[0, :, :half].numpy()


def decoder(folder: Path) -> Decoder:
    """Reads a saved folder without the project's loader: the tests of the model do not lean on it."""
    config = read_target_config(json.loads((folder / "config.json").read_text()), str(folder / "config.json"))
    model = Decoder(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    layers: dict[str, dict[int, np.ndarray]] = {}
    values = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem, kind = name.removeprefix("model.").rpartition(".")[::2]
        if stem in ("embed_tokens", "lm_head"):
            values[f"{stem.removesuffix('_tokens')}.weight"] = tensor
        elif stem == "norm":
            values["norm.scale"] = tensor
        else:
            _, index, path = stem.split(".", 2)
            leaf = "bias" if kind == "bias" else "kernel" if tensor.ndim == 2 else "scale"
            layers.setdefault(f"layers.{path}.{leaf}", {})[int(index)] = tensor.T if leaf == "kernel" else tensor
    for path, by_layer in layers.items():
        values[path] = np.stack([by_layer[i] for i in range(config.num_layers)])
    set_parameters(model, values)
    return model


def empty_cache(model: Decoder, batch: int, slots: int, *, fill: float = 0.0) -> KVCache:
    block = model.config.block
    cache = kv_cache.init(model.config.num_layers, batch, block.num_kv_heads, slots, block.head_dim, jnp.float32)
    return KVCache(cache.k + fill, cache.v + fill)


@functools.partial(nnx.jit, static_argnames=("capture",))
def forward(model: Decoder, tokens, positions, cache, lengths, capture=()):
    return model(tokens, positions, cache, lengths, capture=capture)


def run_in_chunks(model: Decoder, tokens: np.ndarray, sizes: list[int], *, fill: float = 0.0):
    """Feeds tokens [T] in chunks through a cache; returns (logits [T, V], boundaries [L + 1, T, D], hidden [T, D])."""
    cache = empty_cache(model, 1, len(tokens) + 3, fill=fill)
    capture = tuple(range(model.config.num_layers + 1))
    logits, boundaries, hidden, start = [], [], [], 0
    for size in sizes:
        now, at = jnp.asarray(tokens[None, start : start + size], jnp.int32), jnp.array([start])
        out = forward(model, now, at[:, None] + jnp.arange(size)[None, :], cache, at, capture)
        cache = kv_cache.write(cache, out.kv, at, jnp.array([size]))
        logits.append(out.logits[0])
        boundaries.append(jnp.moveaxis(out.aux[0], 1, 0))
        hidden.append(out.hidden[0])
        start += size
    assert start == len(tokens)
    return np.concatenate(logits), np.concatenate(boundaries, axis=1), np.concatenate(hidden)


def assert_close(ours, theirs: np.ndarray, what: str, tolerance: float = 1e-4) -> None:
    """Largest absolute error, as a share of the range of the reference."""
    error = np.abs(np.asarray(ours) - theirs).max() / (theirs.max() - theirs.min())
    assert error <= tolerance, f"{what}: {error:.2e} of the range"
