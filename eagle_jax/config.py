"""What a target and a drafter are: frozen records.

Every number a layer needs is a field here without a default, so that no layer can invent one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal

from eagle_jax.errors import ConfigError

RotaryKind = Literal["default", "linear", "llama3", "yarn"]


@dataclasses.dataclass(frozen=True)
class RotaryConfig:
    """Rotary position embedding. Fields of another kind than `kind` are None.

    Attributes:
      kind: the frequency schedule.
      base: theta.
      factor: how far the context was stretched (linear, llama3, yarn).
      original_max_position: the context length before stretching (llama3, yarn).
      low_freq_factor, high_freq_factor: wavelength borders (llama3).
      beta_fast, beta_slow: rotations at the borders of the ramp (yarn).
      attention_factor: factor on cos and sin; None derives it as the YaRN paper does (yarn).
      mscale, mscale_all_dim: DeepSeek's form of the same factor (yarn).
      truncate: round the ramp's borders to whole dimensions (yarn).
    """

    kind: RotaryKind
    base: float
    factor: float | None = None
    original_max_position: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        for name in ("base", "factor", "original_max_position", "beta_fast", "beta_slow"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"rotary {name} must be positive, found {value}")


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """One decoder block, as the target and the drafter both build it.

    Attributes:
      hidden_size: width of the residual stream (D or H).
      num_heads, num_kv_heads, head_dim: N, K, h. head_dim is explicit, never hidden_size / num_heads.
      mlp_size: F.
      norm_eps: epsilon of every RMSNorm.
      qkv_bias, o_bias, mlp_bias: whether these projections add a bias.
      qk_norm: RMSNorm over each head's query and key (Qwen3).
      activation: gate activation of the MLP.
      rotary: the position embedding.
      sliding_window: a query sees at most this many positions, itself included; None sees all.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    norm_eps: float
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    activation: Literal["silu", "gelu", "gelu_tanh"]
    rotary: RotaryConfig
    sliding_window: int | None

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "mlp_size"):
            _require_positive(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim ({self.head_dim}) must be even for rotary embeddings")
        if self.sliding_window is not None:
            _require_positive("sliding_window", self.sliding_window)


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """A target model.

    Attributes:
      family: key of `eagle_jax.target.FAMILIES`.
      block: what every block looks like.
      num_layers: L.
      vocab_size: V.
      max_position: the longest context the model was made for.
      tied_head: the head is the embedding table.
      sliding_layers: per layer, whether `block.sliding_window` applies; None when no layer slides.
      eos_token_ids: ids that end a text (empty when the files name none).
      bos_token_id: id that starts a text, or None.
    """

    family: str
    block: BlockConfig
    num_layers: int
    vocab_size: int
    max_position: int
    tied_head: bool
    sliding_layers: tuple[bool, ...] | None
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None

    def __post_init__(self) -> None:
        for name in ("num_layers", "vocab_size", "max_position"):
            _require_positive(name, getattr(self, name))
        if self.sliding_layers is not None and len(self.sliding_layers) != self.num_layers:
            raise ConfigError(
                f"sliding_layers names {len(self.sliding_layers)} layers, the model has {self.num_layers}"
            )


@dataclasses.dataclass(frozen=True)
class DrafterConfig:
    """An EAGLE-3 or EAGLE-3.1 drafter.

    Attributes:
      block: what every drafter block looks like (block 0 reads 2H, the others H).
      num_layers: number of drafter blocks.
      target_hidden_size: D, width of one captured state.
      vocab_size: V, the target's vocabulary.
      draft_vocab_size: U; U < V needs a draft-to-target table.
      max_position: the longest context the drafter was trained for (a hint: longer contexts run).
      capture_layers: ids of the captured boundaries in this project's numbering (id i = the residual stream entering
        block i, 0 = embeddings, L = after the last block); None when the files do not say.
      num_captured: A.
      fc_norm: one RMSNorm per captured state before `fc` (EAGLE-3.1).
      norm_before_fc: one RMSNorm over the concatenated states before `fc`.
      norm_output: the state fed to the next draft step is the normed one (EAGLE-3.1); else the raw one (EAGLE-3).
      norm_before_residual: the first block's residual is the normed feature.
      fc_bias: `fc` adds a bias.
      own_embedding, own_head: the files carry the table; otherwise it is the target's.
    """

    block: BlockConfig
    num_layers: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    max_position: int
    capture_layers: tuple[int, ...] | None
    num_captured: int
    fc_norm: bool
    norm_before_fc: bool
    norm_output: bool
    norm_before_residual: bool
    fc_bias: bool
    own_embedding: bool
    own_head: bool

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "target_hidden_size",
            "vocab_size",
            "draft_vocab_size",
            "max_position",
            "num_captured",
        ):
            _require_positive(name, getattr(self, name))
        if self.fc_norm and self.norm_before_fc:
            raise ConfigError("fc_norm and norm_before_fc exclude each other: one norm per state, or one over all")
        if self.draft_vocab_size > self.vocab_size:
            raise ConfigError(f"draft_vocab_size ({self.draft_vocab_size}) exceeds vocab_size ({self.vocab_size})")
        if self.capture_layers is not None and len(self.capture_layers) != self.num_captured:
            raise ConfigError(
                f"capture_layers {list(self.capture_layers)} names {len(self.capture_layers)} layers, "
                f"num_captured is {self.num_captured}"
            )
        if not self.own_head and self.draft_vocab_size != self.vocab_size:
            raise ConfigError(
                f"a draft vocabulary of {self.draft_vocab_size} (the target's has {self.vocab_size}) needs the "
                "drafter's own lm_head: the target's cannot be borrowed"
            )
        if not self.own_embedding and self.block.hidden_size != self.target_hidden_size:
            raise ConfigError(
                f"a drafter of width {self.block.hidden_size} needs its own embed_tokens: the target's has width "
                f"{self.target_hidden_size}"
            )
        if not self.own_head and self.block.hidden_size != self.target_hidden_size:
            raise ConfigError(
                f"a drafter of width {self.block.hidden_size} needs its own lm_head: the target's has width "
                f"{self.target_hidden_size}"
            )

    @property
    def full_vocabulary(self) -> bool:
        return self.draft_vocab_size == self.vocab_size


def default_capture_layers(num_layers: int) -> tuple[int, int, int]:
    """The three boundaries every public EAGLE-3 project captures by default (2, L//2, L-3)."""
    return (2, num_layers // 2, num_layers - 3)


def check_capture_layers(ids: Iterable[int], num_layers: int) -> tuple[int, ...]:
    """Return `ids` as a tuple, or raise ConfigError when they collide, are unsorted or leave [0, num_layers]."""
    ids = tuple(ids)
    outside = [i for i in ids if not 0 <= i <= num_layers]
    if outside:
        raise ConfigError(f"captured layers {outside} leave [0, {num_layers}] (0 = embeddings, {num_layers} = last)")
    if len(set(ids)) != len(ids):
        raise ConfigError(f"captured layers {list(ids)} collide: each boundary can be captured once")
    if list(ids) != sorted(ids):
        raise ConfigError(f"captured layers {list(ids)} must ascend: fc's columns are ordered low to high")
    return ids


def check_pair(target: TargetConfig, drafter: DrafterConfig) -> None:
    """Raises ConfigError when the drafter was made for another target."""
    if drafter.target_hidden_size != target.block.hidden_size:
        raise ConfigError(
            f"the drafter was made for a target of width {drafter.target_hidden_size}, this one has "
            f"{target.block.hidden_size}"
        )
    if drafter.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the drafter was made for a vocabulary of {drafter.vocab_size} tokens, this target has {target.vocab_size}"
        )
    if drafter.capture_layers is None:
        raise ConfigError("the drafter's configuration names no captured layers; set capture_layers")
    check_capture_layers(drafter.capture_layers, target.num_layers)


def _require_positive(name: str, value: int) -> None:
    if value <= 0:
        raise ConfigError(f"{name} must be positive, found {value}")
