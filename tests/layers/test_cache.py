"""Cache writes: per-row positions, and never over an older entry."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eagle_jax.layers import cache as kv_cache
from eagle_jax.records import NewKV

L, B, K, S, T, H = 2, 3, 2, 8, 4, 2
write = jax.jit(kv_cache.write)
rows = st.lists(st.integers(0, S + 2), min_size=B, max_size=B)
counts = st.lists(st.integers(0, T), min_size=B, max_size=B)


@given(rows, counts)
def test_write_equals_numpy(start, count):
    cache = kv_cache.init(L, B, K, S, H, jnp.float32)
    new = np.arange(1, 1 + L * B * K * T * H, dtype=np.float32).reshape(L, B, K, T, H)
    wanted = np.zeros((L, B, K, S, H), np.float32)
    for b in range(B):
        for t in range(count[b]):
            if start[b] + t < S:
                wanted[:, b, :, start[b] + t] = new[:, b, :, t]
    written = write(cache, NewKV(jnp.array(new), jnp.array(-new)), jnp.array(start), jnp.array(count))
    np.testing.assert_array_equal(written.k, wanted)
    np.testing.assert_array_equal(written.v, -wanted)


def test_a_write_past_the_end_drops_and_does_not_slide_back():
    """8 slots, 4 entries written at 6: slots 6 and 7 are new, 4 and 5 keep what they had."""
    cache = jax.tree.map(jnp.ones_like, kv_cache.init(1, 1, 1, 8, 1, jnp.float32))
    new = jnp.arange(10.0, 14.0).reshape(1, 1, 1, 4, 1)
    written = write(cache, NewKV(new, new), jnp.array([6]), jnp.array([4]))
    assert written.k[0, 0, 0, :, 0].tolist() == [1, 1, 1, 1, 1, 1, 10, 11]


def test_entries_take_the_cache_dtype():
    cache = kv_cache.init(1, 1, 1, 2, 1, jnp.bfloat16)
    new = jnp.ones((1, 1, 1, 1, 1), jnp.float32)
    assert write(cache, NewKV(new, new), jnp.array([0]), jnp.array([1])).k.dtype == jnp.bfloat16


def test_path_picks_nodes_per_row():
    new = jnp.arange(2 * 4, dtype=jnp.float32).reshape(1, 2, 1, 4, 1)
    taken = kv_cache.take_path(NewKV(new, new), jnp.array([[0, 2], [0, 3]]))
    assert taken.k[0, :, 0, :, 0].tolist() == [[0, 2], [4, 7]]
