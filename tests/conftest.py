"""Every test runs on the CPU as 8 devices, in full precision, and strictly."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
# Small programs that run once: compiling them fast matters more than the code that comes out.
os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ["HF_HUB_OFFLINE"] = "1"

import hypothesis
import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")

# Compiling inside an example takes long once and nothing afterwards, so a deadline would only be noise.
hypothesis.settings.register_profile(
    "project", deadline=None, max_examples=30, derandomize="CI" in os.environ, database=None
)
hypothesis.settings.load_profile("project")
