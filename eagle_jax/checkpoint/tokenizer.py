"""Tokenizers of Hugging Face folders and of GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle_jax.errors import CheckpointError, first_line


def load_tokenizer(path: Path | str) -> Any:
    """The tokenizer of a Hugging Face folder or of a .gguf file (a transformers fast tokenizer).

    Code inside a folder is never run.

    Raises:
      CheckpointError: there is none, or it cannot be read.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        from eagle_jax.checkpoint.gguf import GgufSource
        from eagle_jax.checkpoint.gguf_tokenizer import read_tokenizer

        return read_tokenizer(GgufSource(path))
    folder = path if path.is_dir() else path.parent
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise CheckpointError(f"{folder}: holds no tokenizer (tokenizer.json, tokenizer.model or vocab.json)")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library raises whatever its parsers raise
        raise CheckpointError(f"{folder}: the tokenizer cannot be read: {first_line(error)}") from error
