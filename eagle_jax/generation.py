"""Decoding from the host: fixed shapes, compiled programs, batches of ragged prompts, results.

One program per bucket holds prefill and the whole loop. The streaming form splits it in two, a start and a few rounds
per call, with the state donated from call to call.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from eagle_jax import autoregressive, speculative
from eagle_jax.config import DrafterConfig, TargetConfig, check_pair
from eagle_jax.errors import ConfigError, InputError
from eagle_jax.layers import cache as kv_cache
from eagle_jax.prefill import Prompts
from eagle_jax.records import KVCache
from eagle_jax.results import GenerateResult, RowResult
from eagle_jax.sharding import ROWS, Placement, row_shards
from eagle_jax.verifier.commit import Limits

MAX_EOS_TOKENS = 8


def bucket(size: int) -> int:
    """The smallest of 16, 24, 32, 48, 64, 96, 128, ... that holds `size`: at most half is padding, usually far less."""
    power = 16
    while True:
        if size <= power:
            return power
        if size <= power * 3 // 2:
            return power * 3 // 2
        power *= 2


@dataclasses.dataclass(frozen=True)
class _Shape:
    """What a compiled program is specialised for: rows, prompt bucket, output bucket."""

    rows: int
    prompt: int
    output: int


class Generator:
    """Compiles and runs generation for one target, with or without a drafter.

    Example:
      generator = Generator(target.model, drafter.model, num_draft_tokens=4)
      result = generator.generate([prompt_ids], max_new_tokens=128)

    Args:
      target: a `Decoder`.
      drafter: an `Eagle3Drafter`, or None for plain decoding.
      num_draft_tokens: G.
      prefill_chunk: prompt tokens per forward pass.
      placement: where the target lives; None is the default device.
      draft_placement: where the drafter lives; None is as the target.

    Attributes:
      compile_seconds, num_compilations: what compiling has cost so far.

    Raises:
      ConfigError: a drafter of another target, options below 1.
    """

    def __init__(
        self,
        target,
        drafter=None,
        *,
        num_draft_tokens: int = 4,
        prefill_chunk: int = 256,
        placement: Placement | None = None,
        draft_placement: Placement | None = None,
    ):
        if prefill_chunk < 1:
            raise ConfigError(f"prefill_chunk must be at least 1, found {prefill_chunk}")
        if drafter is not None:
            if num_draft_tokens < 1:
                raise ConfigError(f"num_draft_tokens must be at least 1, found {num_draft_tokens}")
            check_pair(target.config, drafter.config)
            drafter.bind(target.embed, target.head)
        self.config: TargetConfig = target.config
        self.draft_config: DrafterConfig | None = None if drafter is None else drafter.config
        self.num_draft_tokens = num_draft_tokens if drafter is not None else 0
        self.prefill_chunk = prefill_chunk
        self.compile_seconds = 0.0
        self.num_compilations = 0
        self._placement = placement
        self._draft_placement = draft_placement or placement
        self._dtype = target.dtype
        self._draft_dtype = None if drafter is None else drafter.dtype
        # float32 means float32: on a TPU the default precision would multiply in bfloat16.
        self._precision = "highest" if self._dtype == jnp.float32 else None
        self._graph, self._parameters = nnx.split((target, drafter))
        self._programs: dict[tuple[str, _Shape], Any] = {}

    def update_drafter(self, drafter) -> None:
        """Decodes with other weights of the same drafter from now on; compiled programs stay.

        Args:
          drafter: bound, with the same configuration, dtype and placement.
        """
        target, _ = nnx.merge(self._graph, self._parameters)
        drafter.bind(target.embed, target.head)
        self._parameters = nnx.split((target, drafter))[1]

    # What runs on the device. `models` are rebuilt inside the trace, so weights are arguments and never constants.

    def _caches(self, shape: _Shape) -> tuple[KVCache, KVCache | None]:
        block = self.config.block
        slots = -(-(shape.prompt + shape.output + self.num_draft_tokens + 1) // 64) * 64

        def new(layers: int, block, dtype, placement: Placement | None) -> KVCache:
            cache = kv_cache.init(layers, shape.rows, block.num_kv_heads, slots, block.head_dim, dtype)
            if placement is None:
                return cache
            return jax.lax.with_sharding_constraint(cache, placement.cache(shape.rows, block.num_kv_heads))

        cache = new(self.config.num_layers, block, self._dtype, self._placement)
        if self.draft_config is None:
            return cache, None
        draft = self.draft_config
        return cache, new(draft.num_layers, draft.block, self._draft_dtype, self._draft_placement)

    def _start(self, shape: _Shape, parameters, prompts: Prompts, limits: Limits):
        target, drafter = nnx.merge(self._graph, parameters)
        cache, draft_cache = self._caches(shape)
        output = jnp.zeros((shape.rows, shape.output), jnp.int32)
        chunk = min(self.prefill_chunk, shape.prompt)
        if draft_cache is None:
            return autoregressive.start(target, prompts, limits, cache, output=output, chunk=chunk)
        return speculative.start(
            target, drafter, prompts, limits, cache, draft_cache, output=output, G=self.num_draft_tokens, chunk=chunk
        )

    def _advance(self, parameters, state, limits: Limits, max_rounds: jax.Array):
        target, drafter = nnx.merge(self._graph, parameters)
        if drafter is None:
            return autoregressive.run(target, state, limits, max_rounds)
        return speculative.run(target, drafter, state, limits, self.num_draft_tokens, max_rounds)

    @staticmethod
    def _summary(state) -> dict[str, jax.Array]:
        """The small arrays of a state that results are made from."""
        summary = {"tokens": state.emitted.tokens, "count": state.emitted.count, "done": state.emitted.done}
        if isinstance(state, speculative.SpeculativeState):
            summary |= {"rounds": state.rounds, "accepted": state.accepted, "cut": state.cut}
        return summary

    def _whole(self, shape: _Shape, parameters, prompts: Prompts, limits: Limits) -> dict[str, jax.Array]:
        state = self._start(shape, parameters, prompts, limits)
        return self._summary(self._advance(parameters, state, limits, jnp.int32(shape.output)))

    # Compiling.

    def _program(self, name: str, shape: _Shape, function: Callable, *arguments, **jit_options) -> Any:
        """The compiled `function` for these arguments' shapes and placements, compiled once per bucket."""
        key = (name, shape)
        if key not in self._programs:
            begin = time.perf_counter()
            with jax.default_matmul_precision(self._precision):
                self._programs[key] = jax.jit(function, **jit_options).lower(*arguments).compile()
            self.compile_seconds += time.perf_counter() - begin
            self.num_compilations += 1
        return self._programs[key]

    def _place(self, values: Any, spec: PartitionSpec) -> Any:
        """Host values -> device arrays, split by `spec` where there is a mesh."""
        if self._placement is None:
            return jax.tree.map(jnp.asarray, values)
        return jax.device_put(values, NamedSharding(self._placement.mesh, spec))

    def _state_placement(self, state: Any, shape: _Shape) -> Any:
        """Shardings of a state, so that what a call returns is laid out as the next call takes it."""
        if self._placement is None:
            return None
        rows = NamedSharding(self._placement.mesh, ROWS)
        shardings = jax.tree.map(lambda _: rows, state)
        cache = self._placement.cache(shape.rows, self.config.block.num_kv_heads)
        shardings = dataclasses.replace(shardings, cache=jax.tree.map(lambda _: cache, state.cache))
        if self.draft_config is not None:
            assert self._draft_placement is not None
            draft = self._draft_placement.cache(shape.rows, self.draft_config.block.num_kv_heads)
            shardings = dataclasses.replace(shardings, draft_cache=jax.tree.map(lambda _: draft, state.draft_cache))
        return shardings

    # Batches.

    def _batch(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, eos: tuple[int, ...], rows: int
    ) -> tuple[_Shape, Prompts, Limits]:
        """Pads a batch to its bucket. Rows beyond the prompts may emit nothing, so they end at once."""
        longest = bucket(max(len(prompt) for prompt in prompts))
        chunk = min(self.prefill_chunk, longest)
        shape = _Shape(rows, -(-longest // chunk) * chunk, bucket(min(max_new_tokens, self.config.max_position)))
        tokens = np.zeros((rows, shape.prompt + 1), np.int32)
        lengths, room = np.ones((rows,), np.int32), np.zeros((rows,), np.int32)
        for i, prompt in enumerate(prompts):
            tokens[i, : len(prompt)] = prompt
            lengths[i] = len(prompt)
            room[i] = min(max_new_tokens, self.config.max_position - len(prompt))
        ends = np.full((MAX_EOS_TOKENS,), -1, np.int32)
        ends[: len(eos)] = eos
        tokens, lengths, room = self._place((tokens, lengths, room), ROWS)
        return shape, Prompts(tokens, lengths), Limits(room, self._place(ends, PartitionSpec()))

    def _check(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, eos: Sequence[int] | None, batch_size: int | None
    ) -> tuple[tuple[int, ...], int]:
        """Returns (end tokens, rows per batch)."""
        if max_new_tokens < 1:
            raise InputError(f"max_new_tokens must be at least 1, found {max_new_tokens}")
        if batch_size is not None and batch_size < 1:
            raise InputError(f"batch_size must be at least 1, found {batch_size}")
        vocab, limit = self.config.vocab_size, self.config.max_position
        for i, prompt in enumerate(prompts):
            if not len(prompt):
                raise InputError(f"prompt {i} is empty: generation needs at least one token to start from")
            if len(prompt) >= limit:
                raise InputError(f"prompt {i} has {len(prompt)} tokens; the target's context holds {limit}")
            if not all(0 <= token < vocab for token in prompt):
                raise InputError(f"prompt {i} has a token id outside [0, {vocab})")
        eos = self.config.eos_token_ids if eos is None else tuple(eos)
        if len(eos) > MAX_EOS_TOKENS:
            raise InputError(f"at most {MAX_EOS_TOKENS} end tokens are supported, found {len(eos)}")
        if not all(0 <= token < vocab for token in eos):
            raise InputError(f"an end token of {list(eos)} lies outside [0, {vocab})")
        rows = batch_size or max(len(prompts), 1)
        if self._placement is not None:
            split = row_shards(self._placement.mesh)
            rows = -(-rows // split) * split
        return eos, rows

    def _rows(self, summary: dict[str, np.ndarray], eos: tuple[int, ...], how_many: int) -> list[RowResult]:
        results = []
        for i in range(how_many):
            tokens = summary["tokens"][i, : summary["count"][i]].tolist()
            plain = "rounds" not in summary
            results.append(
                RowResult(
                    tokens=tokens,
                    finish_reason="stop" if tokens and tokens[-1] in eos else "length",
                    rounds=max(len(tokens) - 1, 0) if plain else int(summary["rounds"][i]),
                    accepted_per_position=[] if plain else summary["accepted"][i].tolist(),
                    cut_per_position=[] if plain else summary["cut"][i].tolist(),
                )
            )
        return results

    # Public calls.

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        eos_token_ids: Sequence[int] | None = None,
        batch_size: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> GenerateResult:
        """Greedy answers to all prompts.

        Args:
          prompts: token ids, one non-empty list per prompt, in [0, V).
          max_new_tokens: most tokens per answer; an answer also ends where the target's context does.
          eos_token_ids: ids that end an answer; None takes the target's, () ends none.
          batch_size: rows decoded together; None is all prompts at once.
          progress: called with the number of prompts answered by each batch.

        Raises:
          InputError: an empty or overlong prompt, ids outside the vocabulary, options out of range.
        """
        eos, rows = self._check(prompts, max_new_tokens, eos_token_ids, batch_size)
        results: list[RowResult] = []
        seconds = 0.0
        for begin in range(0, len(prompts), rows):
            batch = prompts[begin : begin + rows]
            shape, padded, limits = self._batch(batch, max_new_tokens, eos, rows)
            arguments = (self._parameters, padded, limits)
            program = self._program("whole", shape, functools.partial(self._whole, shape), *arguments)
            start = time.perf_counter()
            summary = jax.device_get(program(*arguments))
            seconds += time.perf_counter() - start
            results += self._rows(summary, eos, len(batch))
            if progress is not None:
                progress(len(batch))
        return GenerateResult(results, seconds)

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        eos_token_ids: Sequence[int] | None = None,
        rounds_per_call: int = 4,
    ) -> Iterator[list[list[int]] | GenerateResult]:
        """Like `generate` for one batch, but yields the new tokens of each row after every few rounds.

        Yields:
          Lists of newly emitted tokens per row, then once the `GenerateResult`.
        """
        if rounds_per_call < 1:
            raise InputError(f"rounds_per_call must be at least 1, found {rounds_per_call}")
        eos, rows = self._check(prompts, max_new_tokens, eos_token_ids, None)
        if not prompts:
            yield GenerateResult([], 0.0)
            return
        shape, padded, limits = self._batch(prompts, max_new_tokens, eos, rows)
        first = functools.partial(self._start, shape)
        arguments = (self._parameters, padded, limits)
        placement = self._state_placement(jax.eval_shape(first, *arguments), shape)
        program = self._program("start", shape, first, *arguments, out_shardings=placement)
        how_many_rounds = self._place(np.int32(rounds_per_call), PartitionSpec())

        begin = time.perf_counter()
        state = program(*arguments)
        shown = [0] * len(prompts)
        seconds = 0.0
        while True:
            summary = jax.device_get(self._summary(state))
            seconds += time.perf_counter() - begin
            yield [summary["tokens"][i, shown[i] : summary["count"][i]].tolist() for i in range(len(prompts))]
            shown = [int(count) for count in summary["count"][: len(prompts)]]
            if summary["done"].all():
                break
            step = (self._parameters, state, limits, how_many_rounds)
            advance = self._program("advance", shape, self._advance, *step, donate_argnums=1, out_shardings=placement)
            begin = time.perf_counter()
            state = advance(*step)
        yield GenerateResult(self._rows(summary, eos, len(prompts)), seconds)


@functools.lru_cache(maxsize=4)
def _generator(target, drafter, num_draft_tokens: int, prefill_chunk: int) -> Generator:
    return Generator(target, drafter, num_draft_tokens=num_draft_tokens, prefill_chunk=prefill_chunk)


def generate(
    target,
    drafter,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    num_draft_tokens: int = 4,
    eos_token_ids: Sequence[int] | None = None,
    batch_size: int | None = None,
    prefill_chunk: int = 256,
) -> GenerateResult:
    """Greedy answers of `target` (a `Decoder`), sped up by `drafter` (an `Eagle3Drafter`, or None for plain decoding).

    The output is the target's own, whatever the drafter. Compiled programs are kept for the models used last; a
    `Generator` keeps them for as long as it lives, places models on a mesh, and streams. Arguments are those of
    `Generator` and `Generator.generate`.
    """
    generator = _generator(target, drafter, num_draft_tokens, prefill_chunk)
    return generator.generate(
        prompts, max_new_tokens=max_new_tokens, eos_token_ids=eos_token_ids, batch_size=batch_size
    )
