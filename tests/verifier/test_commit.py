"""Where rows end inside a block."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eagle_jax.verifier.commit import Emitted, Limits, emit

ROOM = 6
jitted = jax.jit(emit)


@given(
    st.lists(st.integers(0, 4), min_size=0, max_size=5),
    st.lists(st.integers(0, 4), min_size=4, max_size=4),
    st.integers(0, 4),
    st.integers(0, ROOM),
    st.sets(st.integers(0, 4), max_size=2),
    st.booleans(),
)
def test_emit_equals_lists(before, block, count, limit, ends, done):
    before = before[:limit]
    tokens = np.zeros((1, ROOM), np.int32)
    tokens[0, : len(before)] = before
    state = Emitted(jnp.array(tokens), jnp.array([len(before)]), jnp.array([done]))
    eos = jnp.array(sorted(ends) + [-1] * (3 - len(ends)))
    new, kept = jitted(state, jnp.array([block]), jnp.array([count]), Limits(jnp.array([limit]), eos))

    taken = [] if done else block[: min(count, limit - len(before))]
    first_end = next((i for i, token in enumerate(taken) if token in ends), None)
    if first_end is not None:
        taken = taken[: first_end + 1]
    text = before + taken
    assert int(kept[0]) == len(taken)
    assert int(new.count[0]) == len(text)
    assert new.tokens[0, : len(text)].tolist() == text
    assert not new.tokens[0, len(text) :].any()
    assert bool(new.done[0]) == (done or first_end is not None or len(text) >= limit)
