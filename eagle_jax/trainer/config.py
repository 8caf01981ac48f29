"""A training recipe: one strict YAML file, every key with its meaning here. The shell may override: `key=value`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from eagle_jax.config import BlockConfig, DrafterConfig, TargetConfig, check_capture_layers, default_capture_layers
from eagle_jax.errors import ConfigError, InputError
from eagle_jax.trainer.losses import LossSettings
from eagle_jax.trainer.optimizer import OptimizerSettings


class Section(BaseModel):
    """A part of the recipe: unknown keys are refused, values never change."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class DrafterSection(Section):
    """What is trained. Sizes that are not given are the target's.

    Attributes:
      version: "3.1" turns fc_norm and norm_output on, "3" off; the single switches may differ.
      start_from: a drafter to go on from (a folder in any layout); it brings its own configuration and vocabulary.
      vocabulary: file of `eagle-jax data vocab`; None is the target's whole vocabulary.
      capture_layers: boundaries (block inputs); None is 2, L//2, L-3.
      head_init: "target" starts from the target's rows, "fresh" at random; train_head: false freezes it.
    """

    version: Literal["3.1", "3"] = "3.1"
    start_from: str | None = None
    vocabulary: Path | None = None
    capture_layers: tuple[int, ...] | None = None
    num_layers: int = Field(default=1, ge=1)
    mlp_size: int | None = Field(default=None, ge=1)
    fc_norm: bool | None = None
    norm_output: bool | None = None
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    head_init: Literal["target", "fresh"] = "target"
    train_head: bool = True

    @field_validator("version", mode="before")
    @classmethod
    def _as_text(cls, value: Any) -> Any:
        return str(value) if isinstance(value, (int, float)) else value  # YAML reads 3.1 as a number

    def build(self, target: TargetConfig, draft_vocab_size: int) -> DrafterConfig:
        """The drafter's configuration beside a target.

        Raises:
          ConfigError: captured layers that the target lacks, or switches that exclude each other.
        """
        block = target.block
        ids = self.capture_layers or default_capture_layers(target.num_layers)
        check_capture_layers(ids, target.num_layers)
        new = self.version == "3.1"
        return DrafterConfig(
            block=BlockConfig(
                hidden_size=block.hidden_size,
                num_heads=block.num_heads,
                num_kv_heads=block.num_kv_heads,
                head_dim=block.head_dim,
                mlp_size=self.mlp_size or block.mlp_size,
                norm_eps=block.norm_eps,
                qkv_bias=False,
                o_bias=False,
                mlp_bias=False,
                qk_norm=False,
                activation="silu",
                rotary=block.rotary,
                sliding_window=None,
            ),
            num_layers=self.num_layers,
            target_hidden_size=block.hidden_size,
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab_size,
            max_position=target.max_position,
            capture_layers=tuple(ids),
            num_captured=len(ids),
            fc_norm=(new and not self.norm_before_fc) if self.fc_norm is None else self.fc_norm,
            norm_before_fc=self.norm_before_fc,
            norm_output=new if self.norm_output is None else self.norm_output,
            norm_before_residual=self.norm_before_residual,
            fc_bias=False,
            own_embedding=False,
            own_head=True,
        )


class DataSection(Section):
    """What is trained on.

    Attributes:
      train, evaluate: folders of `eagle-jax data prepare`.
      length: T, tokens per packed row; rows: per microbatch, over all hosts; accumulate: microbatches per step.
      seed: of the order.
    """

    train: Path
    evaluate: Path | None = None
    length: int = Field(default=2048, ge=8)
    rows: int = Field(default=8, ge=1)
    accumulate: int = Field(default=1, ge=1)
    seed: int = Field(default=0, ge=0)


class MeshSection(Section):
    """Sizes of the mesh axes; their product is the number of devices used."""

    data: int = Field(default=1, ge=1)
    fsdp: int = Field(default=1, ge=1)
    tensor: int = Field(default=1, ge=1)


class TrainConfig(Section):
    """The whole recipe.

    Attributes:
      target: folder, hub id, .gguf file or built-in name.
      run: folder of this run: checkpoints, metrics, curves, exported drafter. A second start resumes it.
      dtype: of computing; masters are float32 always. None is the target's.
      save_every, evaluate_every, log_every: in steps; keep: checkpoints that stay.
      export: layouts written at the end.
    """

    target: str
    run: Path
    drafter: DrafterSection = DrafterSection()
    data: DataSection
    loss: LossSettings = LossSettings()
    optimizer: OptimizerSettings
    mesh: MeshSection = MeshSection()
    dtype: Literal["float32", "bfloat16"] | None = None
    save_every: int = Field(default=500, ge=1)
    evaluate_every: int = Field(default=500, ge=1)
    log_every: int = Field(default=10, ge=1)
    keep: int = Field(default=3, ge=1)
    export: tuple[Literal["safeailab", "vllm", "sglang", "speculators", "orbax"], ...] = ("vllm",)

    @model_validator(mode="after")
    def _rows_divide(self) -> TrainConfig:
        shards = self.mesh.data * self.mesh.fsdp
        if self.data.rows % shards:
            raise ValueError(f"data.rows ({self.data.rows}) is not a multiple of mesh.data x mesh.fsdp ({shards})")
        return self


def read_config(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Reads a recipe.

    Args:
      overrides: "section.key=value" each, values in YAML.

    Raises:
      InputError: the file cannot be read, or an override is no assignment.
      ConfigError: unknown keys or values out of range, by name.
    """
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise InputError(f"{path}: cannot read: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected sections and keys, found {type(values).__name__}")
    for override in overrides:
        _assign(values, override)
    try:
        return TrainConfig.model_validate(values)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, p['loc'])) or 'recipe'}: {p['msg']}" for p in error.errors()]
        raise ConfigError(f"{path}: {'; '.join(problems)}") from error


def _assign(values: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    keys = name.split(".")
    if not equals or not all(keys):
        raise InputError(f"{override!r}: expected section.key=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"{override!r}: the value is not YAML") from error
    for key in keys[:-1]:
        values = values.setdefault(key, {})
        if not isinstance(values, dict):
            raise InputError(f"{override!r}: {key} is a value, not a section")
    values[keys[-1]] = value
