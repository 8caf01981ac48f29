"""What `eagle-jax generate` does: load, decode, print text as it is accepted, compare, report."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from eagle_jax import sharding
from eagle_jax.checkpoint.hub import cache_folder
from eagle_jax.checkpoint.load import Drafter, Target, load_drafter, load_target
from eagle_jax.data.chat import StreamDecoder, encode_chat
from eagle_jax.data.prompts import Prompt, read_prompts
from eagle_jax.errors import InputError
from eagle_jax.generation import Generator
from eagle_jax.report import print_generate, print_warnings, stdout, write_json
from eagle_jax.results import GenerateResult


@dataclasses.dataclass(frozen=True)
class GenerateOptions:
    """The options of `eagle-jax generate`; `drafter` None is plain decoding, one of `prompt` and `prompts` is set."""

    target: str
    drafter: str | None
    prompt: str | None
    prompts: Path | None
    max_new_tokens: int
    num_draft_tokens: int
    batch_size: int
    dtype: str | None
    compare: bool
    ignore_eos: bool
    limit: int | None
    prefill_chunk: int
    mesh: tuple[int, int] | None
    replicate_drafter: bool
    norm_output_meaning: Literal["feedback", "specforge"]


def generate(options: GenerateOptions, *, json_file: Path | None, quiet: bool) -> None:
    """Runs the command. Text and tables go to stdout, progress to stderr."""
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    progress = Console(stderr=True, quiet=quiet)
    prompts = _prompts(options)
    target, drafter = _load(options, progress)
    encoded = [_encode(prompt, target, options) for prompt in prompts]
    placement, draft_placement = _placements(options)

    def generator(model: Any) -> Generator:
        return Generator(
            target.model,
            model,
            num_draft_tokens=options.num_draft_tokens,
            prefill_chunk=options.prefill_chunk,
            placement=placement,
            draft_placement=draft_placement,
        )

    main = generator(None if drafter is None else drafter.model)
    if options.prompt is not None:
        result = _stream(main, encoded, target.tokenizer, options)
    else:
        result = _decode(main, encoded, options, progress, "Answering")
    baseline = plain = None
    if options.compare:
        plain = generator(None)
        baseline = _decode(plain, encoded, options, progress, "Decoding plainly")

    report = to_json(prompts, encoded, target.tokenizer, main, result, baseline)
    if not quiet:
        print_generate(stdout(), report["summary"], plain.compile_seconds if plain is not None else None)
    write_json(json_file, report)


def _prompts(options: GenerateOptions) -> list[Prompt]:
    if options.prompt is not None:
        return [Prompt("prompt", None, (options.prompt,))]
    assert options.prompts is not None
    return read_prompts(options.prompts, options.limit)


def _encode(prompt: Prompt, target: Target, options: GenerateOptions) -> list[int]:
    name = "--prompt" if options.prompts is None else f"{options.prompts}: prompt {prompt.id!r}"
    try:
        tokens = encode_chat(target.tokenizer, [prompt.turns[0]])
    except InputError as error:
        raise InputError(f"{name}: {error}") from error
    if len(tokens) >= target.config.max_position:
        raise InputError(f"{name}: has {len(tokens)} tokens; the target's context holds {target.config.max_position}")
    return tokens


def _placements(options: GenerateOptions) -> tuple[sharding.Placement | None, sharding.Placement | None]:
    if options.mesh is None:
        return None, None
    mesh = sharding.make_mesh(*options.mesh)
    return sharding.Placement(mesh), sharding.Placement(mesh, replicated=options.replicate_drafter)


def _load(options: GenerateOptions, progress: Console) -> tuple[Target, Drafter | None]:
    placement, draft_placement = _placements(options)
    dtype = None if options.dtype is None else jnp.dtype(options.dtype)
    with progress.status(f"Loading {options.target}"):
        target = load_target(options.target, dtype=dtype, placement=placement)
    if options.drafter is None:
        return target, None
    with progress.status(f"Loading {options.drafter}"):
        drafter = load_drafter(
            options.drafter,
            target,
            placement=draft_placement,
            norm_output_meaning=options.norm_output_meaning,
        )
    warnings = list(drafter.warnings)
    if drafter.config.max_position < target.config.max_position:
        warnings.append(
            f"the drafter was trained for {drafter.config.max_position} positions, the target for "
            f"{target.config.max_position}: beyond, fewer of its guesses may be accepted"
        )
    print_warnings(progress, warnings)
    return target, drafter


def _end_tokens(options: GenerateOptions) -> tuple[int, ...] | None:
    return () if options.ignore_eos else None


def _stream(generator: Generator, encoded: list[list[int]], tokenizer: Any, options: GenerateOptions) -> GenerateResult:
    """Prints the answer to one prompt as it is accepted."""
    decoder = StreamDecoder(tokenizer)
    for piece in generator.stream(encoded, max_new_tokens=options.max_new_tokens, eos_token_ids=_end_tokens(options)):
        if isinstance(piece, GenerateResult):
            print(decoder.finish(), flush=True)
            return piece
        print(decoder.push(piece[0]), end="", flush=True)
    raise AssertionError("a stream ends with its result")


def _decode(
    generator: Generator, encoded: list[list[int]], options: GenerateOptions, console: Console, what: str
) -> GenerateResult:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Where nothing can be redrawn, a bar that vanishes leaves blank lines.
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=len(encoded))
        return generator.generate(
            encoded,
            max_new_tokens=options.max_new_tokens,
            eos_token_ids=_end_tokens(options),
            batch_size=min(options.batch_size, len(encoded)),
            progress=lambda answered: bar.advance(task, answered),
        )


def to_json(
    prompts: list[Prompt],
    encoded: list[list[int]],
    tokenizer: Any,
    generator: Generator,
    result: GenerateResult,
    baseline: GenerateResult | None,
) -> dict[str, Any]:
    """The result as the command writes it; field names are stable."""
    summary: dict[str, Any] = {
        "output_tokens": result.output_tokens,
        "rounds": result.rounds,
        "mean_acceptance_length": result.mean_acceptance_length,
        "acceptance_per_position": result.acceptance_per_position,
        "tokens_per_second": result.tokens_per_second,
        "compile_seconds": generator.compile_seconds,
        "num_compilations": generator.num_compilations,
    }
    if baseline is not None:
        pairs = zip(result.rows, baseline.rows, strict=True)
        summary["baseline"] = {
            "tokens_per_second": baseline.tokens_per_second,
            "identical_outputs": sum(ours.tokens == theirs.tokens for ours, theirs in pairs),
            "total_outputs": len(result.rows),
        }
        summary["speedup"] = result.tokens_per_second / baseline.tokens_per_second
    rows = []
    for prompt, tokens, row in zip(prompts, encoded, result.rows, strict=True):
        rows.append(
            {
                "id": prompt.id,
                "prompt_tokens": tokens,
                "output_tokens": row.tokens,
                "text": tokenizer.decode(row.tokens, skip_special_tokens=True),
                "finish_reason": row.finish_reason,
                "rounds": row.rounds,
                "accepted_per_position": row.accepted_per_position,
                "cut_per_position": row.cut_per_position,
            }
        )
    return {"results": rows, "summary": summary}
