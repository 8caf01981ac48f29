"""Parameters of a module by canonical path, for tests that bring weights of their own."""

import numpy as np
from flax import nnx


def parameters(module: nnx.Module) -> dict[str, nnx.Variable]:
    """Every array variable by path, as in "layers.0.mlp.up_proj.kernel"."""
    return {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(module))}


def set_parameters(module: nnx.Module, values: dict[str, np.ndarray]) -> None:
    """Replaces every parameter; paths and shapes must fit exactly."""
    current = nnx.to_flat_state(nnx.state(module))
    paths = {".".join(map(str, path)) for path, _ in current}
    assert paths == set(values), (sorted(paths - set(values)), sorted(set(values) - paths))
    replaced = []
    for path, leaf in current:
        value = np.asarray(values[".".join(map(str, path))], dtype=leaf.dtype)
        assert leaf.shape == value.shape, (path, leaf.shape, value.shape)
        replaced.append((path, leaf.replace(value)))
    nnx.update(module, nnx.from_flat_state(replaced))


def randomize(module: nnx.Module, seed: int) -> dict[str, np.ndarray]:
    """Random values for every parameter, norms and biases included, large enough for every term to matter.

    Returns what was set, by path. An integer table (draft_to_target) keeps its values.
    """
    random = np.random.default_rng(seed)
    values = {}
    for path, leaf in parameters(module).items():
        noise = random.standard_normal(leaf.shape).astype(np.float32)
        if path.endswith("draft_to_target"):
            values[path] = np.asarray(leaf[...])
        elif path.endswith("scale"):
            values[path] = 1 + 0.3 * noise
        elif path.endswith("bias"):
            values[path] = 0.3 * noise
        else:
            values[path] = noise * np.float32(leaf.shape[-2 if path.endswith("kernel") else -1] ** -0.5)
    set_parameters(module, values)
    return values
