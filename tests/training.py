"""A tiny training run: settings, packed chats, a fresh drafter beside a target."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import tiny
from flax import nnx

from eagle_jax.drafter.eagle3 import Eagle3Drafter
from eagle_jax.trainer.batch import Batch
from eagle_jax.trainer.losses import LossSettings
from eagle_jax.trainer.optimizer import OptimizerSettings, make_optimizer
from eagle_jax.trainer.step import Frozen, TrainState, TrainStep

LOSS = LossSettings(
    steps=2, kind="kl", step_decay=0.8, reduction="supervised", alignment="predicted", only_draft_vocab=True,
    remat=False, block=32,
)  # fmt: skip
ADAMW = OptimizerSettings(
    kind="adamw", learning_rate=1e-2, muon_learning_rate=2e-2, schedule="cosine", final_share=0.05, warmup_steps=10,
    total_steps=300, b1=0.9, b2=0.95, weight_decay=0.0, clip=1.0,
)  # fmt: skip
NEW_TOKENS = 41  # the prefill's, and eight whole rounds of five


def packed(chats, T=128) -> Batch:
    """Two chats per row, [2, T]."""
    arrays = np.zeros((4, 2, T), np.int32)
    for row in range(2):
        begin = 0
        for number, (prompt, answer) in enumerate(chats[2 * row : 2 * row + 2], start=1):
            n, text = len(prompt), prompt + answer
            here = slice(begin, begin + len(text))
            arrays[0, row, here], arrays[2, row, here], arrays[3, row, here] = text, number, range(len(text))
            arrays[1, row, begin + n : here.stop] = 1
            begin = here.stop
    tokens, mask, documents, positions = (jnp.asarray(a) for a in arrays)
    return Batch(tokens, mask.astype(bool), documents, positions)


def split(batch: Batch, micro: int) -> Batch:
    return jax.tree.map(lambda a: a.reshape(micro, -1, *a.shape[1:]), batch)


def make(target, optimizer=ADAMW, *, loss=LOSS, online=True, dtype=jnp.float32, frozen_head=False, **changes):
    """(step, state, frozen) for a fresh drafter with its own head over the whole vocabulary."""
    config = tiny.drafter_config(target.config, own_head=True, **changes)
    drafter = nnx.jit(lambda: Eagle3Drafter(config, dtype=jnp.float32, rngs=nnx.Rngs(7)))()
    parameters = {".".join(map(str, p)): leaf[...] for p, leaf in nnx.to_flat_state(nnx.state(drafter))}
    table = parameters.pop("draft_to_target", None)
    kept = {} if table is None else {"draft_to_target": table}
    if frozen_head:
        kept["lm_head.weight"] = parameters.pop("lm_head.weight")
    graph, weights = nnx.split(target)
    transform = make_optimizer(optimizer)
    step = TrainStep(config, loss, transform, dtype, graph if online else None)
    rows = target.head.weight[...] if table is None else target.head.weight[...][table]
    frozen = Frozen(kept, target.embed.weight[...], rows, weights if online else None)
    return step, TrainState(jnp.int32(0), parameters, jax.jit(transform.init)(parameters)), frozen
