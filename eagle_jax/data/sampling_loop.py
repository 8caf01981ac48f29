"""Plain sampling by temperature, for making data: one token per target pass."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from eagle_jax import autoregressive
from eagle_jax.errors import InputError
from eagle_jax.generation import Generator, _Shape
from eagle_jax.prefill import Prompts, prefill
from eagle_jax.results import GenerateResult, RowResult
from eagle_jax.sharding import ROWS
from eagle_jax.verifier.commit import Emitted, Limits


def choose(seeds: jax.Array, temperature: jax.Array, logits: jax.Array, positions: jax.Array) -> jax.Array:
    """[B] tokens drawn from softmax(logits / temperature); a row's draw depends on its seed [B] and position only."""
    keys = jax.vmap(lambda seed, position: jax.random.fold_in(jax.random.key(seed), position))(seeds, positions)
    scaled = logits.astype(jnp.float32) / temperature
    return jax.vmap(jax.random.categorical)(keys, scaled).astype(jnp.int32)


class Sampler(Generator):
    """A `Generator` that can also sample; a drafter, if there is one, speeds up the greedy answers only."""

    def _sampled(self, shape: _Shape, parameters, prompts: Prompts, limits: Limits, seeds, temperature):
        target, _ = nnx.merge(self._graph, parameters)
        # The last prompt token waits for the first step, whose logits the first draw needs.
        length = prompts.lengths - 1
        chunk = min(self.prefill_chunk, shape.prompt)
        _, cache, _, _ = prefill(target, None, Prompts(prompts.tokens, length), self._caches(shape)[0], None, chunk)
        last = jnp.take_along_axis(prompts.tokens, length[:, None], axis=1)[:, 0]
        output = jnp.zeros((shape.rows, shape.output), jnp.int32)
        emitted = Emitted(output, jnp.zeros_like(length), limits.max_new_tokens <= 0)
        state = autoregressive.PlainState(emitted, last, length, cache)
        pick = functools.partial(choose, seeds, temperature)
        return self._summary(autoregressive.run(target, state, limits, jnp.int32(shape.output), pick))

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        temperature: float,
        seeds: Sequence[int],
        max_new_tokens: int,
        eos_token_ids: Sequence[int] | None = None,
        batch_size: int | None = None,
    ) -> GenerateResult:
        """Answers drawn at `temperature`, or greedy ones at 0; `seeds` has one number per prompt, 0 .. 2^32 - 1.

        Raises:
          InputError: as `generate`; a temperature that is negative or not finite.
        """
        if not (temperature >= 0 and math.isfinite(temperature)):
            raise InputError(f"temperature must be a finite number, 0 or more, found {temperature}")
        if temperature == 0:
            options = {"max_new_tokens": max_new_tokens, "eos_token_ids": eos_token_ids, "batch_size": batch_size}
            return self.generate(prompts, **options)  # type: ignore[arg-type]
        eos, rows = self._check(prompts, max_new_tokens, eos_token_ids, batch_size)
        results: list[RowResult] = []
        seconds = 0.0
        for begin in range(0, len(prompts), rows):
            batch = prompts[begin : begin + rows]
            shape, padded, limits = self._batch(batch, max_new_tokens, eos, rows)
            drawn = np.zeros((rows,), np.uint32)
            drawn[: len(batch)] = seeds[begin : begin + rows]
            scale = self._place(np.float32(temperature), PartitionSpec())
            arguments = (self._parameters, padded, limits, self._place(drawn, ROWS), scale)
            program = self._program("sampled", shape, functools.partial(self._sampled, shape), *arguments)
            start = time.perf_counter()
            summary = jax.device_get(program(*arguments))
            seconds += time.perf_counter() - start
            results += self._rows(summary, eos, len(batch))
        return GenerateResult(results, seconds)
