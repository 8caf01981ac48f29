"""The two numberings of captured layers.

This project, vLLM and speculators count boundaries: id i is the residual stream entering block i. SpecForge, SGLang,
TorchSpec, Model-Optimizer and Automodel count outputs: id i is the stream leaving block i, which is boundary i + 1. The
first kind stands at the top level of config.json and the second under `eagle_config`, so one file can serve both.
"""

from __future__ import annotations

from typing import Any

from eagle_jax.config_reader import ConfigReader
from eagle_jax.errors import ConfigError

KEY = "eagle_aux_hidden_state_layer_ids"


def read_captured(
    reader: ConfigReader, eagle: ConfigReader, nested_may_be_shifted: bool, warnings: list[str]
) -> tuple[int, ...] | None:
    """Captured boundaries in this project's numbering, or None when the file names none.

    Args:
      reader: the top level.
      eagle: `eagle_config`.
      nested_may_be_shifted: the nested list may repeat the top level's numbers.
      warnings: gets a line when the file leaves something open.
    """
    top, nested = read_ids(reader), read_ids(eagle)
    shifted = None if nested is None else tuple(i + 1 for i in nested)
    if top is not None and nested is not None and top != shifted:
        if not (nested_may_be_shifted and top == nested):
            raise reader.fail(
                KEY,
                f"{list(top)} and eagle_config's {list(nested)} name different layers: the nested ids count block "
                f"outputs, so they must be {[i - 1 for i in top]}",
            )
        warnings.append(f"{reader.where}: eagle_config repeats the top level's ids {list(top)}; SGLang would add 1")
    if top is not None:
        return top
    if shifted is not None:
        warnings.append(
            f"{reader.where}: only eagle_config names captured layers, {list(nested or ())} counted as block outputs = "
            f"{list(shifted)} counted as block inputs; vLLM would misread or ignore them"
        )
        return shifted
    warnings.append(no_ids(reader.where))
    return None


def no_ids(where: str) -> str:
    """The warning for a file that names no captured layers."""
    return f"{where}: names no captured layers; the usual 2, L/2, L-3 (block inputs) will be assumed"


def read_ids(reader: ConfigReader) -> tuple[int, ...] | None:
    """The list under KEY as the file counts, or None."""
    ids = reader.list(KEY, None)
    if ids is None or len(ids) == 0:
        return None
    if not all(type(i) is int and i >= 0 for i in ids):
        raise reader.fail(KEY, f"{ids}: expected layer numbers, 0 or more")
    if list(ids) != sorted(set(ids)):
        raise reader.fail(KEY, f"{ids}: must ascend without repeats, because fc's columns are ordered low to high")
    return tuple(ids)


def captured_both(ids: tuple[int, ...] | None) -> dict[str, Any]:
    """Both numberings; the nested one is left out when it has no name for a boundary."""
    if ids is None:
        return {"eagle_config": {"use_aux_hidden_state": True}}
    nested = {} if 0 in ids else {KEY: [i - 1 for i in ids]}
    return {KEY: list(ids), "eagle_config": {**nested, "use_aux_hidden_state": True}}


def captured_nested(ids: tuple[int, ...] | None) -> dict[str, Any]:
    """Both numberings, for a reader that only knows the nested one."""
    if ids is not None and 0 in ids:
        raise ConfigError(
            f"captured layers {list(ids)}: boundary 0 (the embeddings) is the output of no block, so this layout, "
            "which counts block outputs, cannot name it; write the vllm or speculators layout"
        )
    return captured_both(ids)
