"""What the compiled programs contain: no weights, no host calls, aliased caches, one compilation per bucket."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from eagle_jax.generation import Generator, bucket

MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def big_enough():
    """Weights of several MB, so that one of them as a constant would show."""
    block = {"hidden_size": 256, "num_heads": 8, "num_kv_heads": 4, "head_dim": 32, "mlp_size": 512}
    target = tiny.target(vocab_size=2048, block=block)
    return target, tiny.drafter(target, draft_vocab_size=512, own_head=True)


def lowered(generator: Generator, how: str):
    """The traced and lowered program of one bucket, without running it."""
    shape, prompts, limits = generator._batch([[5, 6, 7]], 16, (2,), 1)
    start = lambda parameters, prompts, limits: generator._start(shape, parameters, prompts, limits)  # noqa: E731
    arguments = (generator._parameters, prompts, limits)
    if how == "whole":
        return jax.jit(lambda *args: generator._whole(shape, *args)).lower(*arguments)
    state = jax.eval_shape(start, *arguments)
    advance = jax.jit(generator._advance, donate_argnums=1)
    return advance.lower(generator._parameters, state, limits, jnp.int32(4))


@pytest.mark.parametrize("speculative", [False, True])
@pytest.mark.parametrize("how", ["whole", "advance"])
def test_no_large_constants_and_no_host_calls(big_enough, speculative, how):
    target, drafter = big_enough
    program = lowered(Generator(target, drafter if speculative else None), how)
    text = program.as_text()
    sizes = [
        np.prod([int(n) for n in dims.split("x") if n.isdigit()] or [1])
        for dims in re.findall(r"stablehlo\.constant dense<.*?> : tensor<([^>]*)>", text)
    ]
    assert sizes and max(sizes) * 4 < MEGABYTE
    compiled = program.compile().as_text()
    for word in ("callback", "infeed", "outfeed", " send(", " recv("):
        assert word not in compiled


def test_a_weight_as_a_constant_would_be_found(big_enough):
    """The check above can fail: a program that closes over the weights has constants of their size."""
    target, _ = big_enough
    program = jax.jit(lambda x: x @ target.embed.weight[...].T).lower(jnp.ones((1, 256)))
    sizes = re.findall(r"stablehlo\.constant dense<.*?> : tensor<([^>]*)>", program.as_text())
    assert "2048x256xf32" in sizes


@pytest.mark.parametrize("speculative", [False, True])
def test_caches_are_donated_and_aliased(big_enough, speculative):
    target, drafter = big_enough
    generator = Generator(target, drafter if speculative else None)
    program = lowered(generator, "advance").compile()
    shape = generator._batch([[5, 6, 7]], 16, (2,), 1)[0]
    caches = jax.eval_shape(lambda: generator._caches(shape))
    cache_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(caches))
    assert program.memory_analysis().alias_size_in_bytes >= cache_bytes


def test_a_streamed_state_is_gone_after_the_next_call(big_enough):
    generator = Generator(*big_enough)
    shape, prompts, limits = generator._batch([[5, 6, 7]], 16, (), 1)
    state = jax.jit(lambda *args: generator._start(shape, *args))(generator._parameters, prompts, limits)
    advance = jax.jit(generator._advance, donate_argnums=1)
    advance(generator._parameters, state, limits, jnp.int32(2))
    assert state.cache.k.is_deleted() and state.draft_cache.k.is_deleted()


def test_one_compilation_per_bucket():
    target = tiny.target()
    generator = Generator(target, tiny.drafter(target))
    for length in (5, 6, 7, 5, 16):
        generator.generate([[5] * length], max_new_tokens=10)
        generator.generate([[5] * length], max_new_tokens=16, eos_token_ids=(length,))
    assert generator.num_compilations == 1
    generator.generate([[5] * 17], max_new_tokens=10)
    assert generator.num_compilations == 2


def test_compile_size_does_not_grow_with_depth():
    def lines(num_layers: int) -> int:
        target = tiny.target(num_layers=num_layers)
        return len(lowered(Generator(target, tiny.drafter(target)), "whole").as_text().splitlines())

    assert lines(24) == lines(6)


def test_captures_cost_no_copy_of_the_buffer(big_enough):
    """The scan over layers updates the captured states in place: nothing of the buffer's size is copied per layer."""
    target, drafter = big_enough
    generator = Generator(target, drafter)
    text = lowered(generator, "advance").compile().as_text()
    rows = generator.num_draft_tokens + 1
    buffer = rf"f32\[4,1,{rows},256\]"
    assert re.search(buffer, text)
    assert not re.search(rf"= {buffer}\S* copy\(", text)


def test_leaks_no_tracers():
    target = tiny.target()
    with jax.checking_leaks():
        lowered(Generator(target, tiny.drafter(target)), "whole")


def test_buckets_hold_their_size_and_waste_less_than_half():
    assert [bucket(n) for n in (1, 16, 17, 24, 25, 100, 129)] == [16, 16, 24, 24, 32, 128, 192]
    for n in range(16, 3000, 7):
        assert n <= bucket(n) < 1.5 * n + 8
