"""Imports go one way, heavy or optional libraries wait until they are needed, and files stay readable."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("eagle_jax", "pallas_kernels")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

# Lowest first. A module may import from its own layer and from those below; `peers` must not know each other.
LAYERS: list[tuple[str, ...]] = [
    ("pallas_kernels",),
    ("eagle_jax.errors",),
    ("eagle_jax.config", "eagle_jax.config_reader", "eagle_jax.records"),
    ("eagle_jax.sharding",),
    ("eagle_jax.layers",),
    ("eagle_jax.target", "eagle_jax.drafter"),
    ("eagle_jax.proposal", "eagle_jax.verifier"),
    ("eagle_jax.prefill", "eagle_jax.speculative", "eagle_jax.autoregressive", "eagle_jax.results"),
    ("eagle_jax.generation",),
    ("eagle_jax.checkpoint", "eagle_jax.data"),
    ("eagle_jax.trainer",),
    ("eagle_jax.report", "eagle_jax.commands", "eagle_jax.data_commands"),
    ("eagle_jax.cli", "eagle_jax.cli_data", "eagle_jax.cli_options"),
]
PEERS = [
    ("eagle_jax.target", "eagle_jax.drafter"),
    ("eagle_jax.proposal", "eagle_jax.target"),
    ("eagle_jax.proposal", "eagle_jax.drafter"),
    ("eagle_jax.verifier", "eagle_jax.target"),
    ("eagle_jax.verifier", "eagle_jax.drafter"),
    ("eagle_jax.proposal", "eagle_jax.verifier"),
    ("eagle_jax.checkpoint", "eagle_jax.data"),
]
# Modules that only training imports may need what the others must do without until a function asks for it.
TRAINING_ONLY = {"training_rows.py": {"grain"}}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(imported module, whether at module level) of every import of a file; `from a import b` counts as a and a.b."""
    tree = ast.parse(path.read_text())
    top = {id(node) for node in ast.walk(tree) if isinstance(node, ast.Module) for node in node.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [node.module or ""] + [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            yield name, id(node) in top


def layer_of(name: str) -> tuple[int, str] | None:
    for level, members in enumerate(LAYERS):
        for member in members:
            if name == member or name.startswith(member + "."):
                return level, member
    return None


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path):
    name = module_name(path)
    if name == "eagle_jax":  # the package's own exports
        return
    mine = layer_of(name)
    assert mine is not None, f"{name} has no place in LAYERS"
    for imported, _ in imports(path):
        theirs = layer_of(imported)
        if theirs is None:
            continue
        assert theirs[0] <= mine[0], f"{name} imports {imported}, which lies above it"
        for a, b in PEERS:
            crosses = (within(name, a) and within(imported, b)) or (within(name, b) and within(imported, a))
            assert not crosses, f"{name} imports {imported}: they meet in what calls both"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_kernels_know_only_jax_and_optional_libraries_wait(path: Path):
    for imported, at_top in imports(path):
        library = imported.split(".")[0]
        if within(module_name(path), "pallas_kernels"):
            assert library in {"jax", "pallas_kernels", "__future__", *sys.stdlib_module_names}, imported
        if library in {"torch", "transformers", "orbax", "grain", "array_record"} - TRAINING_ONLY.get(path.name, set()):
            assert not at_top, f"{path.name} imports {library} at module level: it takes seconds, or is an extra"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_can_be_read_in_one_sitting(path: Path):
    assert len(path.read_text().splitlines()) <= 400


def test_tracked_files_name_no_machine():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    machine_path = re.compile(r"(^|[^A-Za-z0-9_.-])/(root|home|Users)/")
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if not path.exists() or path == Path(__file__):
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        assert not machine_path.search(text), f"{name} holds a path of one machine"
        assert path.stat().st_size < 3_000_000, f"{name} is large"
