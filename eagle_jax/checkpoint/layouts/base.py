"""What a drafter layout is, and the names and shapes of a drafter's tensors."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from eagle_jax.checkpoint.keymap import INDEX, Rule
from eagle_jax.checkpoint.tensors import Entry, TensorSource, open_tensors, write_safetensors
from eagle_jax.config import DrafterConfig

# What `norm_output: true` says about a file: the normed state is fed back (vLLM, SGLang, speculators), or only that the
# norm precedes the head (SpecForge's trainer before it took over the other meaning).
NormOutputMeaning = Literal["feedback", "specforge"]
DRAFT_TO_TARGET = "draft_to_target"
# Stored names that hold no parameter: the vocabulary tables are checked and read apart.
VOCABULARY = ("d2t", "t2d")


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the tensors of a drafter say before its configuration is read.

    Attributes:
      where: configuration file, for messages.
      shapes: canonical path -> shape as stored, for every stored tensor with a known name.
    """

    where: str
    shapes: Mapping[str, tuple[int, ...]]

    def __contains__(self, path: str) -> bool:
        return path in self.shapes

    @property
    def num_layers(self) -> int:
        """Number of drafter blocks the file holds."""
        found = (re.match(r"layers\.(\d+)\.", path) for path in self.shapes)
        return 1 + max((int(match.group(1)) for match in found if match), default=0)


def _save_safetensors(folder: Path, entries: Iterable[Entry]) -> None:
    write_safetensors(folder / "model.safetensors", entries)


@dataclasses.dataclass(frozen=True)
class Layout:
    """One way to store a drafter.

    Attributes:
      name: key of LAYOUTS.
      title: whose layout it is, for messages.
      read_config: (config.json's object, facts, meaning of norm_output) -> (configuration, warnings).
      write_config: (configuration, dtype name, target's name or None) -> config.json's object; None when this project
        only reads the layout.
      write_rules: the names to write.
      mirror_norms: layers >= 1 are written with `hidden_norm` beside an equal `input_layernorm`, because vLLM reads one
        and SGLang the other.
      canonical: arrays are stored under their canonical paths and orientation, absolute vocabulary ids included.
      open_source: opens the arrays of a folder.
      save: writes entries (name, shape, dtype, function returning the array) into a folder.
      cannot_store: what no reader of the layout can run, in words; writing such a drafter is refused.
      write_warnings: what readers of the layout will ignore.
    """

    name: str
    title: str
    read_config: Callable[[dict[str, Any], Facts, NormOutputMeaning], tuple[DrafterConfig, list[str]]]
    write_config: Callable[[DrafterConfig, str, str | None], dict[str, Any]] | None = None
    write_rules: Callable[[DrafterConfig], tuple[Rule, ...]] = lambda config: rules()
    mirror_norms: bool = False
    canonical: bool = False
    open_source: Callable[[Path], TensorSource] = open_tensors
    save: Callable[[Path, Iterable[Entry]], None] = _save_safetensors
    cannot_store: Callable[[DrafterConfig], list[str]] = lambda config: []
    write_warnings: Callable[[DrafterConfig], list[str]] = lambda config: []


_LAYER_MATRICES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
_LAYER_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")


def rules(prefix: str = "", layer: str = f"layers.{INDEX}.") -> tuple[Rule, ...]:
    """The names of a drafter's tensors.

    Args:
      prefix: stands before every name but the head's.
      layer: stored prefix of a block; without `{i}` it is block 0.
    """
    block = f"layers.{INDEX}." if INDEX in layer else "layers.0."
    table = [
        Rule(f"{prefix}fc.weight", "fc.kernel", transpose=True),
        Rule(f"{prefix}fc.bias", "fc.bias"),
        Rule(f"{prefix}fc_norm.{INDEX}.weight", "fc_norm.scale", stacked=True),
        Rule(f"{prefix}input_norm.weight", "input_norm.scale"),
        Rule(f"{prefix}norm.weight", "norm.scale"),
        Rule(f"{prefix}embed_tokens.weight", "embed.weight"),
        Rule("lm_head.weight", "lm_head.weight"),
    ]
    for name in _LAYER_MATRICES:
        table.append(Rule(f"{prefix}{layer}{name}.weight", f"{block}{name}.kernel", transpose=True))
        table.append(Rule(f"{prefix}{layer}{name}.bias", f"{block}{name}.bias"))
    for name in _LAYER_NORMS:
        table.append(Rule(f"{prefix}{layer}{name}.weight", f"{block}{name}.scale"))
    return tuple(table)


def midlayer_rules(config: DrafterConfig) -> tuple[Rule, ...]:
    """`midlayer.*` for one block, which it was made for; `layers.N.*` for more."""
    return rules(layer="midlayer.") if config.num_layers == 1 else rules()


def rules_of(names: Iterable[str]) -> tuple[Rule, ...]:
    """The table that fits a file's names: `model.` or no prefix, `midlayer.` or `layers.N.`."""
    names = tuple(names)
    prefix = "model." if any(name.startswith("model.") for name in names) else ""
    midlayer = any(name.startswith(f"{prefix}midlayer.") for name in names)
    return rules(prefix, "midlayer.") if midlayer else rules(prefix)


def canonical_path(table: Iterable[Rule], name: str) -> str | None:
    """The canonical path of a stored name, or None when the table does not know it."""
    for rule in table:
        match = re.fullmatch(re.escape(rule.source).replace(re.escape(INDEX), r"(\d+)"), name)
        if match:
            return rule.target.replace(INDEX, match.group(1)) if match.groups() else rule.target
    return None


def drafter_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Canonical path -> shape of every array of a drafter; linear kernels are [in, out]."""
    block, A, D, H = config.block, config.num_captured, config.target_hidden_size, config.block.hidden_size
    query, keys, F = block.num_heads * block.head_dim, block.num_kv_heads * block.head_dim, block.mlp_size
    shapes: dict[str, tuple[int, ...]] = {"fc.kernel": (A * D, H)}
    if config.fc_bias:
        shapes["fc.bias"] = (H,)
    if config.fc_norm:
        shapes["fc_norm.scale"] = (A, D)
    if config.norm_before_fc:
        shapes["input_norm.scale"] = (A * D,)
    for i in range(config.num_layers):
        layer, width = f"layers.{i}.", 2 * H if i == 0 else H
        shapes[f"{layer}input_layernorm.scale"] = (H,)
        if i == 0:
            shapes[f"{layer}hidden_norm.scale"] = (H,)
        matrices = {
            "self_attn.q_proj": (width, query, block.qkv_bias),
            "self_attn.k_proj": (width, keys, block.qkv_bias),
            "self_attn.v_proj": (width, keys, block.qkv_bias),
            "self_attn.o_proj": (query, H, block.o_bias),
            "mlp.gate_proj": (H, F, block.mlp_bias),
            "mlp.up_proj": (H, F, block.mlp_bias),
            "mlp.down_proj": (F, H, block.mlp_bias),
        }
        for name, (fan_in, fan_out, bias) in matrices.items():
            shapes[f"{layer}{name}.kernel"] = (fan_in, fan_out)
            if bias:
                shapes[f"{layer}{name}.bias"] = (fan_out,)
        if block.qk_norm:
            shapes[f"{layer}self_attn.q_norm.scale"] = (block.head_dim,)
            shapes[f"{layer}self_attn.k_norm.scale"] = (block.head_dim,)
        shapes[f"{layer}post_attention_layernorm.scale"] = (H,)
    shapes["norm.scale"] = (H,)
    if config.own_embedding:
        shapes["embed.weight"] = (config.vocab_size, H)
    if config.own_head:
        shapes["lm_head.weight"] = (config.draft_vocab_size, H)
    if not config.full_vocabulary:
        shapes[DRAFT_TO_TARGET] = (config.draft_vocab_size,)
    return shapes
