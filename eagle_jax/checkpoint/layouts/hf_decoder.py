"""Targets as Hugging Face stores them."""

from __future__ import annotations

import numpy as np

from eagle_jax.checkpoint.keymap import Rule, listed
from eagle_jax.checkpoint.tensors import TensorSource
from eagle_jax.config import TargetConfig
from eagle_jax.errors import CheckpointError

# Where the decoder's tensors live: plain models, then the wrappers of multimodal ones, then bare decoders.
PREFIXES = ("model.", "language_model.model.", "model.language_model.", "")
HEADS = ("lm_head.weight", "language_model.lm_head.weight", "model.lm_head.weight")
# Buffers that older versions of transformers stored; they follow from the configuration.
IGNORED = ("*.rotary_emb.inv_freq",)
_COMPARED_ROWS = 4096


def rules(prefix: str, head: str) -> tuple[Rule, ...]:
    """The layout of a decoder under `prefix` whose head is named `head`."""
    layer, path = prefix + "layers.{i}.", "layers."
    norms = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
    linears = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    return (
        Rule(f"{prefix}embed_tokens.weight", "embed.weight"),
        *(Rule(f"{layer}{name}.weight", f"{path}{name}.scale", stacked=True) for name in norms),
        *(Rule(f"{layer}{name}.weight", f"{path}{name}.kernel", transpose=True, stacked=True) for name in linears),
        *(Rule(f"{layer}{name}.bias", f"{path}{name}.bias", stacked=True) for name in linears),
        Rule(f"{prefix}norm.weight", "norm.scale"),
        Rule(head, "lm_head.weight"),
    )


def find_prefix(source: TensorSource) -> str:
    """The first known prefix under which the files hold an embedding table.

    Raises:
      CheckpointError: none of them, with the names that are there.
    """
    names = source.keys()
    held = set(names)
    for prefix in PREFIXES:
        if f"{prefix}embed_tokens.weight" in held:
            return prefix
    tried = ", ".join(f"{prefix}embed_tokens.weight" for prefix in PREFIXES)
    raise CheckpointError(f"{source.where}: no embedding table (looked for {tried}); it holds: {listed(sorted(names))}")


def find_head(source: TensorSource) -> str | None:
    """The stored name of the head, or None."""
    names = set(source.keys())
    return next((name for name in HEADS if name in names), None)


def check_sizes(config: TargetConfig, source: TensorSource) -> None:
    """Refuses sizes that no stored tensor has, before anything of such a size is planned.

    Raises:
      CheckpointError: naming the size and the largest one that the files could hold.
    """
    block, names = config.block, source.keys()
    largest = max((size for name in names for size in source.info(name).shape), default=0)
    for what, size, limit in (
        ("vocab_size", config.vocab_size, largest),
        ("hidden_size", block.hidden_size, largest),
        ("intermediate_size", block.mlp_size, largest),
        ("attention heads times head_dim", block.num_heads * block.head_dim, largest),
        ("num_hidden_layers", config.num_layers, len(names)),
    ):
        if size > limit:
            raise CheckpointError(
                f"{source.where}: the configuration's {what} of {size} exceeds what is stored ({limit})"
            )


def check_tied(source: TensorSource, prefix: str, head: str) -> None:
    """A file may repeat the embedding as the head of a tied model, but not contradict it.

    Raises:
      CheckpointError: the two differ.
    """
    embedding = f"{prefix}embed_tokens.weight"
    shape = source.info(embedding).shape
    same = source.info(head).shape == shape
    for start in range(0, shape[0] if same and shape else 0, _COMPARED_ROWS):
        rows = (slice(start, min(start + _COMPARED_ROWS, shape[0])),)
        same = same and np.array_equal(source.read(embedding, rows), source.read(head, rows))
    if not same:
        raise CheckpointError(
            f"{source.info(head).file}: {head} differs from {embedding}, although the configuration says "
            "tie_word_embeddings; set it to false if the stored head is the right one"
        )
