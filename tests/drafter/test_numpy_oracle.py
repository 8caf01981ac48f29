"""The drafter against DESIGN section 1 written in numpy, over configurations that hypothesis chooses."""

import jax.numpy as jnp
import numpy as np
from canonical import randomize
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_jax.config import BlockConfig, DrafterConfig, RotaryConfig
from eagle_jax.drafter import Eagle3Drafter
from eagle_jax.layers import cache as kv_cache


class NumpyDrafter:
    """One row, float64, every key kept in a list: no masks, no cache slots, no einsums."""

    def __init__(self, config: DrafterConfig, weights: dict[str, np.ndarray]):
        self.config, self.w = config, {name: np.float64(value) for name, value in weights.items()}
        self.past = [[] for _ in range(config.num_layers)]  # per layer: (position, rotated key [K, h], value [K, h])

    def norm(self, name: str, x):
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + self.config.block.norm_eps) * self.w[f"{name}.scale"]

    def linear(self, name: str, x):
        return x @ self.w[f"{name}.kernel"] + self.w.get(f"{name}.bias", 0.0)

    def rotate(self, x, position: int):
        half = x.shape[-1] // 2
        angles = position * self.config.block.rotary.base ** (-np.arange(half) / half)
        turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
        return np.concatenate([turned.real, turned.imag], axis=-1)

    def attention(self, layer: int, x, position: int):
        b, name = self.config.block, f"layers.{layer}.self_attn"
        q, k, v = (self.linear(f"{name}.{p}_proj", x).reshape(-1, b.head_dim) for p in "qkv")
        if b.qk_norm:
            q, k = self.norm(f"{name}.q_norm", q), self.norm(f"{name}.k_norm", k)
        self.past[layer].append((position, self.rotate(k, position), v))
        seen = [e for e in self.past[layer] if b.sliding_window is None or position - e[0] < b.sliding_window]
        heads = []
        for n, query in enumerate(self.rotate(q, position)):
            shared = n // (b.num_heads // b.num_kv_heads)
            scores = np.array([query @ keys[shared] for _, keys, _ in seen]) / np.sqrt(b.head_dim)
            weights = np.exp(scores - scores.max())
            heads.append(
                sum(w * values[shared] for w, (_, _, values) in zip(weights / weights.sum(), seen, strict=True))
            )
        return self.linear(f"{name}.o_proj", np.concatenate(heads))

    def fuse(self, aux):  # [A, D] -> [H]
        if self.config.fc_norm:
            aux = np.stack([a / np.sqrt(np.mean(a**2) + self.config.block.norm_eps) for a in aux])
            aux = aux * self.w["fc_norm.scale"]
        joined = aux.reshape(-1)
        return self.linear("fc", self.norm("input_norm", joined) if self.config.norm_before_fc else joined)

    def step(self, token: int, feature, position: int):  # -> (logits, feedback)
        x = feature
        for i in range(self.config.num_layers):
            name = f"layers.{i}"
            if i == 0:
                normed = self.norm(f"{name}.hidden_norm", x)
                attended = np.concatenate([self.norm(f"{name}.input_layernorm", self.w["embed.weight"][token]), normed])
                x = normed if self.config.norm_before_residual else x
            else:
                attended = self.norm(f"{name}.input_layernorm", x)
            x = x + self.attention(i, attended, position)
            y = self.norm(f"{name}.post_attention_layernorm", x)
            gate = self.linear(f"{name}.mlp.gate_proj", y)
            x = x + self.linear(
                f"{name}.mlp.down_proj", gate / (1 + np.exp(-gate)) * self.linear(f"{name}.mlp.up_proj", y)
            )
        output = self.norm("norm", x)
        return self.w["lm_head.weight"] @ output, output if self.config.norm_output else x


@st.composite
def configs(draw) -> DrafterConfig:
    flag = st.booleans()
    kv_heads = draw(st.sampled_from([1, 2]))
    before_fc = draw(st.sampled_from(["fc_norm", "norm_before_fc", None]))
    captures = draw(st.integers(1, 4))
    block = BlockConfig(
        hidden_size=12,
        num_heads=kv_heads * draw(st.sampled_from([1, 2])),
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([4, 6])),
        mlp_size=10,
        norm_eps=draw(st.sampled_from([1e-6, 1e-2])),
        qkv_bias=draw(flag),
        o_bias=draw(flag),
        mlp_bias=draw(flag),
        qk_norm=draw(flag),
        activation="silu",
        rotary=RotaryConfig("default", draw(st.sampled_from([100.0, 10000.0]))),
        sliding_window=draw(st.sampled_from([None, 1, 3, 6])),
    )
    return DrafterConfig(
        block=block,
        num_layers=draw(st.integers(1, 2)),
        target_hidden_size=draw(st.sampled_from([8, 12, 16])),
        vocab_size=18,
        draft_vocab_size=draw(st.sampled_from([18, 7])),
        max_position=64,
        capture_layers=None,
        num_captured=captures,
        fc_norm=before_fc == "fc_norm",
        norm_before_fc=before_fc == "norm_before_fc",
        norm_output=draw(flag),
        norm_before_residual=draw(flag),
        fc_bias=draw(flag),
        own_embedding=True,
        own_head=True,
    )


def make(config: DrafterConfig) -> Eagle3Drafter:
    return Eagle3Drafter(config, dtype=jnp.float32, rngs=nnx.Rngs(0))


def empty_cache(config: DrafterConfig, batch: int, slots: int):
    return kv_cache.init(config.num_layers, batch, config.block.num_kv_heads, slots, config.block.head_dim, jnp.float32)


@nnx.jit
def run(drafter, tokens, features, positions, cache, lengths):
    out = drafter.step(drafter.embed_tokens(tokens), features, positions, cache, lengths)
    return out, drafter.logits(out.output)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(config=configs(), seed=st.integers(0, 1000))
def test_ragged_batch_then_further_steps(config, seed):
    """Two rows of 7 and 4 slots in one padded call, then three more steps per row on their caches."""
    drafter, random = make(config), np.random.default_rng(seed)
    weights = randomize(drafter, seed)
    T, counts, steps = 7, np.array([7, 4]), 3
    aux = random.standard_normal((2, T, config.num_captured, config.target_hidden_size)).astype(np.float32)
    tokens = random.integers(config.vocab_size, size=(2, T + steps))

    oracles = [NumpyDrafter(config, weights) for _ in counts]
    expected, feedback = [], []
    for row, oracle in enumerate(oracles):
        for t in range(counts[row]):
            last = oracle.step(tokens[row, t], oracle.fuse(aux[row, t]), t)
            expected.append(last)
        feedback.append(last[1])

    positions = jnp.broadcast_to(jnp.arange(T), (2, T))
    cache = empty_cache(config, 2, T + steps)
    out, logits = run(drafter, jnp.asarray(tokens[:, :T]), drafter.fuse(aux), positions, cache, jnp.zeros(2, jnp.int32))
    valid = np.arange(T) < counts[:, None]
    close(np.asarray(logits)[valid], [e[0] for e in expected])
    close(np.asarray(out.feedback)[valid], [e[1] for e in expected])

    cache = kv_cache.write(cache, out.kv, jnp.zeros(2, jnp.int32), jnp.asarray(counts))
    fed = out.feedback[jnp.arange(2), counts - 1][:, None]
    for j in range(steps):
        at = counts + j
        tokens_now = tokens[np.arange(2), at][:, None]
        out, logits = run(drafter, jnp.asarray(tokens_now), fed, jnp.asarray(at)[:, None], cache, jnp.asarray(at))
        results = [o.step(tokens_now[row, 0], feedback[row], at[row]) for row, o in enumerate(oracles)]
        feedback = [r[1] for r in results]
        close(logits[:, 0], [r[0] for r in results])
        close(out.feedback[:, 0], feedback)
        cache = kv_cache.write(cache, out.kv, jnp.asarray(at), jnp.ones(2, jnp.int32))
        fed = out.feedback


def close(ours, expected):
    ours, expected = np.asarray(ours, np.float64), np.stack(expected)
    assert np.abs(ours - expected).max() <= 2e-5 * max(1.0, np.abs(expected).max())
