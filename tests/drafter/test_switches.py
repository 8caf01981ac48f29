"""Each switch of the drafter on numbers small enough to write down."""

import jax.numpy as jnp
import numpy as np
import pytest
from canonical import randomize, set_parameters
from flax import nnx

from eagle_jax.config import BlockConfig, DrafterConfig, RotaryConfig
from eagle_jax.drafter import Eagle3Drafter
from eagle_jax.errors import ConfigError
from eagle_jax.layers import cache as kv_cache


def make(config: DrafterConfig) -> Eagle3Drafter:
    return Eagle3Drafter(config, dtype=jnp.float32, rngs=nnx.Rngs(0))


def empty_cache(config: DrafterConfig, slots: int):
    return kv_cache.init(config.num_layers, 1, config.block.num_kv_heads, slots, config.block.head_dim, jnp.float32)


def small(hidden: int = 2, **fields) -> DrafterConfig:
    """A drafter of width 2 whose parameters the tests below can write by hand."""
    block = BlockConfig(
        hidden_size=hidden,
        num_heads=1,
        num_kv_heads=1,
        head_dim=2,
        mlp_size=2,
        norm_eps=1e-12,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        activation="silu",
        rotary=RotaryConfig("default", 10000.0),
        sliding_window=None,
    )
    values = {
        "num_layers": 1,
        "target_hidden_size": 2,
        "vocab_size": 5,
        "draft_vocab_size": 5,
        "max_position": 64,
        "capture_layers": None,
        "num_captured": 3,
        "fc_norm": False,
        "norm_before_fc": False,
        "norm_output": False,
        "norm_before_residual": False,
        "fc_bias": False,
        "own_embedding": True,
        "own_head": True,
    }
    return DrafterConfig(block=block, **{**values, **fields})


def silent(config: DrafterConfig) -> Eagle3Drafter:
    """Unit norms, and blocks that add nothing: what comes out is the residual."""
    drafter = make(config)
    for layer in drafter.layers:
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            projection.kernel.set_value(jnp.zeros_like(projection.kernel[...]))
    return drafter


def one_step(drafter: Eagle3Drafter, feature, cache=None, position: int = 0):
    cache = empty_cache(drafter.config, 16) if cache is None else cache
    embedding = drafter.embed_tokens(jnp.array([[1]]))
    feature = jnp.asarray(feature, jnp.float32).reshape(1, 1, -1)
    return drafter.step(embedding, feature, jnp.array([[position]]), cache, jnp.array([position]))


RAW, NORMED = [3.0, 4.0], [0.848528, 1.131371]


@pytest.mark.parametrize(("flag", "residual"), [(False, RAW), (True, NORMED)])
def test_norm_before_residual_decides_what_the_block_adds_to(flag, residual):
    out = one_step(silent(small(norm_before_residual=flag)), RAW)
    assert np.allclose(out.feedback[0, 0], residual, atol=1e-5)


@pytest.mark.parametrize(("flag", "fed_back"), [(False, RAW), (True, NORMED)])
def test_norm_output_decides_what_is_fed_back_and_never_what_the_head_reads(flag, fed_back):
    drafter = silent(small(norm_output=flag))
    out = one_step(drafter, RAW)
    assert np.allclose(out.output[0, 0], NORMED, atol=1e-5)
    assert np.allclose(out.feedback[0, 0], fed_back, atol=1e-5)
    assert np.allclose(drafter.logits(out.output)[0, 0], drafter.lm_head.weight[...] @ jnp.array(NORMED), atol=1e-5)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, [1, 1, 10, 10, 100, 100]),
        ({"norm_before_fc": True}, [0.0172, 0.0172, 0.1723, 0.1723, 1.7234, 1.7234]),
        ({"fc_norm": True}, [1, 1, 1, 1, 1, 1]),
    ],
)
def test_one_norm_per_state_is_not_one_norm_over_all(flags, expected):
    drafter = make(small(hidden=6, **flags))
    drafter.fc.kernel.set_value(jnp.eye(6))
    aux = jnp.array([[1.0, 1.0], [10.0, 10.0], [100.0, 100.0]])[None, None]
    assert np.allclose(drafter.fuse(aux)[0, 0], expected, atol=1e-4)


def test_each_captured_state_has_its_own_scale_in_order():
    drafter = make(small(hidden=6, fc_norm=True))
    drafter.fc.kernel.set_value(jnp.eye(6))
    drafter.fc_norm.scale.set_value(jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    assert np.allclose(drafter.fuse(jnp.ones((1, 1, 3, 2)))[0, 0], [1, 2, 3, 4, 5, 6], atol=1e-5)


def test_both_input_norms_at_once_are_refused():
    with pytest.raises(ConfigError, match="exclude each other"):
        small(fc_norm=True, norm_before_fc=True)


def test_fuse_refuses_states_that_fc_was_not_made_for():
    with pytest.raises(ValueError, match="3 states of width 2"):
        make(small()).fuse(jnp.ones((1, 1, 2, 2)))


@pytest.mark.parametrize("norm_output", [False, True])
def test_feedback_keeps_its_scale_only_with_norm_output(norm_output):
    """Eight drafts of a random drafter with unit norms: the raw state drifts, the normed one cannot."""
    drafter = make(small(hidden=16, norm_output=norm_output))
    values = randomize(drafter, 3)
    set_parameters(drafter, {n: np.ones_like(v) if n.endswith("scale") else 2 * v for n, v in values.items()})
    feature, cache, sizes = np.ones(16), empty_cache(drafter.config, 16), []
    for position in range(8):
        out = one_step(drafter, feature, cache, position)
        cache = kv_cache.write(cache, out.kv, jnp.array([position]), jnp.array([1]))
        feature = out.feedback
        sizes.append(float(jnp.sqrt(jnp.mean(feature**2))))
    if norm_output:
        assert np.allclose(sizes, 1.0, atol=1e-5)
    else:
        assert sizes[-1] > 2 * sizes[0]


def test_explicit_head_dim_sets_the_projections():
    config = small(hidden=20)
    block = BlockConfig(**{**vars(config.block), "num_heads": 4, "num_kv_heads": 2, "head_dim": 8})
    attention = make(DrafterConfig(**{**vars(config), "block": block})).layers[0].self_attn
    shapes = [getattr(attention, f"{name}_proj").kernel.shape for name in "qkvo"]
    assert shapes == [(40, 32), (40, 16), (40, 16), (32, 20)]


def test_a_slot_depends_on_its_own_and_earlier_slots_only():
    """Slot i pairs feature i with embedding i (of token i + 1); later slots change nothing."""
    drafter = make(small(hidden=6))
    randomize(drafter, 1)
    features = jnp.asarray(np.random.default_rng(0).standard_normal((1, 3, 6)), jnp.float32)
    cache, positions, lengths = empty_cache(drafter.config, 3), jnp.arange(3)[None], jnp.zeros(1, jnp.int32)

    def outputs(tokens, features):
        return np.asarray(
            drafter.step(drafter.embed_tokens(jnp.array([tokens])), features, positions, cache, lengths).output
        )[0]

    base = outputs([1, 2, 3], features)
    token_changed, feature_changed = outputs([1, 4, 3], features), outputs([1, 2, 3], features.at[0, 1].add(1.0))
    for changed in (token_changed, feature_changed):
        assert np.array_equal(changed[0], base[0])
        assert np.abs(changed[1:] - base[1:]).max(axis=-1).min() > 1e-3


def test_borrowed_tables_are_the_targets():
    config = small(own_embedding=False, own_head=False)
    lender, drafter = make(small()), make(config)
    drafter.bind(lender.embed, lender.lm_head)
    assert np.array_equal(drafter.embed_tokens(jnp.arange(5)), lender.embed.weight[...])
    assert np.array_equal(drafter.logits(jnp.eye(2)), lender.lm_head.weight[...].T)


def test_own_tables_win_over_the_targets():
    drafter, lender = make(small()), make(small())
    own = np.asarray(drafter.embed.weight[...]), np.asarray(drafter.lm_head.weight[...])
    lender.embed.weight.set_value(2 * lender.embed.weight[...] + 1)
    drafter.bind(lender.embed, lender.lm_head)
    assert np.array_equal(drafter.embed.weight[...], own[0])
    assert np.array_equal(drafter.lm_head.weight[...], own[1])
