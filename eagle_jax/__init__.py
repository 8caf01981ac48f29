"""EAGLE-3.1 speculative decoding for JAX and TPU.

Names are imported on first use, so that `import eagle_jax` and the command line start fast.
"""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "Generator": "eagle_jax.generation",
    "GenerateResult": "eagle_jax.results",
    "generate": "eagle_jax.generation",
    "load_drafter": "eagle_jax.checkpoint.load",
    "load_target": "eagle_jax.checkpoint.load",
    "make_mesh": "eagle_jax.sharding",
    "Placement": "eagle_jax.sharding",
}

__all__ = ["GenerateResult", "Generator", "Placement", "generate", "load_drafter", "load_target", "make_mesh"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'eagle_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
