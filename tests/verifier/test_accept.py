"""Greedy acceptance against a walk written by hand, for chains and for trees."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from eagle_jax.proposal.chain import chain
from eagle_jax.records import DraftTree
from eagle_jax.verifier.accept import accept_greedy

VOCAB = 5
accept = jax.jit(accept_greedy, static_argnames="max_depth")


def logits_for(predicted: np.ndarray) -> jax.Array:
    return jax.nn.one_hot(predicted, VOCAB)


def emitted(verdict) -> list[list[int]]:
    return [row[:n].tolist() for row, n in zip(np.asarray(verdict.tokens), np.asarray(verdict.count), strict=True)]


def test_chain_by_hand():
    tree = chain(jnp.array([[9, 1, 2, 3], [9, 1, 2, 3], [9, 1, 2, 3]]))
    verdict = accept(tree, logits_for(np.array([[1, 2, 3, 4], [1, 2, 0, 4], [0, 2, 3, 4]])), max_depth=3)
    assert emitted(verdict) == [[1, 2, 3, 4], [1, 2, 0], [0]]
    assert np.asarray(verdict.path)[0].tolist() == [0, 1, 2, 3]


def test_a_match_behind_a_mismatch_is_not_accepted():
    tree = chain(jnp.array([[9, 1, 2, 3]]))
    assert emitted(accept(tree, logits_for(np.array([[0, 2, 3, 4]])), max_depth=3)) == [[0]]


def test_ties_go_to_the_lowest_id():
    tree = chain(jnp.array([[4, 0]]))
    assert emitted(accept(tree, jnp.ones((1, 2, VOCAB)), max_depth=1)) == [[0, 0]]


def random_tree(rng: np.random.Generator, nodes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """parents, tokens (siblings differ), depth, ancestors."""
    parents = np.array([-1] + [int(rng.integers(0, i)) for i in range(1, nodes)])
    tokens = np.zeros(nodes, np.int32)
    for parent in range(nodes):
        children = np.flatnonzero(parents == parent)
        if len(children) > VOCAB:
            parents[children[VOCAB:]] = children[VOCAB:] - 1
            children = children[:VOCAB]
        tokens[children] = rng.permutation(VOCAB)[: len(children)]
    depth, ancestors = np.zeros(nodes, np.int32), np.eye(nodes, dtype=bool)
    for i in range(1, nodes):
        depth[i] = depth[parents[i]] + 1
        ancestors[i] |= ancestors[parents[i]]
    return parents, tokens, depth, ancestors


@given(st.integers(0, 2**31 - 1))
def test_trees_against_a_walk(seed):
    rng = np.random.default_rng(seed)
    nodes, batch, deepest = 7, 3, 6
    trees = [random_tree(rng, nodes) for _ in range(batch)]
    predicted = rng.integers(0, VOCAB, (batch, nodes))
    wanted, paths = [], []
    for row, (parents, tokens, _, _) in enumerate(trees):
        node, path = 0, [0]
        while True:
            children = [c for c in range(nodes) if parents[c] == node and tokens[c] == predicted[row, node]]
            if not children:
                break
            node = children[0]
            path.append(node)
        wanted.append(predicted[row, path].tolist())
        paths.append(path)
    stack = lambda i: jnp.array(np.stack([tree[i] for tree in trees]))  # noqa: E731
    verdict = accept(DraftTree(stack(1), stack(2), stack(3)), logits_for(predicted), max_depth=deepest)
    assert emitted(verdict) == wanted
    for row, path in enumerate(paths):
        assert np.asarray(verdict.path)[row, : len(path)].tolist() == path
