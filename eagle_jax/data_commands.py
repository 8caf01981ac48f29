"""What `eagle-jax data ...` does: load, run one library function, show how far it is, report."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from eagle_jax import sharding
from eagle_jax.checkpoint.hub import cache_folder, resolve
from eagle_jax.checkpoint.load import Target, load_drafter, load_target, read_target
from eagle_jax.checkpoint.tokenizer import load_tokenizer
from eagle_jax.data import vocabulary
from eagle_jax.data.chat_output import ChatOutput
from eagle_jax.data.prepared import PreparedData, PrepareOptions, PrepareReport, text_fingerprint
from eagle_jax.data.prepared import prepare as prepare_chats
from eagle_jax.data.regenerate import AnswerOptions, AnswerReport, read_requests, shard_of
from eagle_jax.data.regenerate import regenerate as answer_requests
from eagle_jax.data.sampling_loop import Sampler
from eagle_jax.data.synthesize import SynthesisOptions
from eagle_jax.data.synthesize import synthesize as make_chats
from eagle_jax.errors import InputError
from eagle_jax.report import print_warnings, stdout, write_json


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """The model that writes: `drafter` speeds up greedy answers; `chat_template` replaces the target's own."""

    target: str
    drafter: str | None = None
    dtype: str | None = None
    mesh: tuple[int, int] | None = None
    prefill_chunk: int = 256
    chat_template: Path | None = None


def regenerate(
    model: ModelOptions,
    prompts: Path,
    output: Path,
    options: AnswerOptions,
    *,
    shard: tuple[int, int],
    limit: int | None,
    strict: bool,
    json_file: Path | None,
    quiet: bool,
) -> None:
    """Runs the command; a file that is there already is continued."""
    console = Console(stderr=True, quiet=quiet)
    requests, read = read_requests(prompts, limit=limit, strict=strict)
    requests = shard_of(requests, *shard)
    print_warnings(console, read.messages)
    path = sharded(output, shard)
    with ChatOutput(path, _settings(model, options)) as file:
        target, sampler = _load(model, options, console)
        with _bar(console, "Answering", len(requests)) as advance:
            report = answer_requests(requests, file, sampler, target.tokenizer, options, progress=advance)
    _report_answers(path, report, {"skipped_lines": read.skipped}, json_file, quiet)


def synthesize(
    model: ModelOptions,
    output: Path,
    count: int,
    options: SynthesisOptions,
    answers: AnswerOptions,
    *,
    shard: tuple[int, int],
    json_file: Path | None,
    quiet: bool,
) -> None:
    """Runs the command; a file that is there already is continued until it holds the shard's part of `count`."""
    if not 0 <= shard[0] < shard[1]:
        raise InputError(f"shard {shard[0]}/{shard[1]}: the first number must lie in [0, {shard[1]})")
    console = Console(stderr=True, quiet=quiet)
    settings = _settings(model, answers) | {f"user_{k}": v for k, v in dataclasses.asdict(options).items()}
    path = sharded(output, shard)
    mine = len(range(shard[0], count, shard[1]))
    with ChatOutput(path, settings) as file:
        target, sampler = _load(model, answers, console)
        with _bar(console, "Writing chats", mine) as advance:
            report = make_chats(mine, file, sampler, target.tokenizer, options, answers, shard=shard, progress=advance)
    _report_answers(path, report, {}, json_file, quiet)


def prepare(
    target: str,
    chat_template: Path | None,
    sources: Sequence[Path],
    output: Path,
    options: PrepareOptions,
    *,
    strict: bool,
    overwrite: bool,
    json_file: Path | None,
    quiet: bool,
) -> None:
    """Runs the command: only the target's tokenizer and configuration are read."""
    console = Console(stderr=True, quiet=quiet)
    with console.status(f"Loading the tokenizer of {target}"):
        config = read_target(target)
        tokenizer = _with_template(load_tokenizer(resolve(target)), chat_template)
    with console.status("Preparing chats") as status:

        def show(report: PrepareReport) -> None:
            if report.chats % 100 == 0:
                status.update(f"Preparing chats: {report.chats:,} chats, {report.tokens:,} tokens")

        report = prepare_chats(
            sources,
            output,
            tokenizer,
            options,
            end_token_ids=config.eos_token_ids,
            strict=strict,
            overwrite=overwrite,
            progress=show,
        )
    print_warnings(console, report.problems)
    values = dataclasses.asdict(report)
    if not quiet:
        share = report.answer_tokens / report.tokens
        rows = {name: f"{values[name]:,}" for name in values if isinstance(values[name], int)}
        rows["answer_tokens"] += f" ({share:.0%} of tokens)"
        _print_rows({"written": str(output)} | rows)
    write_json(json_file, {"output": str(output), **values})


def vocab(data: Path, target: str, size: int, output: Path, *, json_file: Path | None, quiet: bool) -> None:
    """Runs the command: counts the answers' tokens, chooses, saves, says what share of them is covered."""
    console = Console(stderr=True, quiet=quiet)
    with console.status(f"Loading the tokenizer of {target}"):
        config = read_target(target)
        tokenizer = load_tokenizer(resolve(target))
    with console.status(f"Counting the tokens of {data}"):
        prepared = PreparedData(data, tokenizer)
        kept = vocabulary.kept_tokens(tokenizer, config.eos_token_ids, config.vocab_size)
        chosen = vocabulary.build(prepared, size, vocab_size=config.vocab_size, always=kept)
    vocabulary.save(chosen, output)
    values = {
        "output": str(output),
        "size": chosen.size,
        "vocab_size": chosen.vocab_size,
        "coverage": chosen.coverage,
        "kept_tokens": kept,
        "data": chosen.data,
    }
    if not quiet:
        _print_rows(
            {
                "written": str(output),
                "size": f"{chosen.size:,} of the target's {chosen.vocab_size:,}",
                "coverage": f"{chosen.coverage:.2%} of the answers' tokens",
            }
        )
    write_json(json_file, values)


def sharded(path: Path, shard: tuple[int, int]) -> Path:
    """Each host's own file: out.jsonl becomes out-00000-of-00004.jsonl."""
    index, count = shard
    return path if count == 1 else path.with_name(f"{path.stem}-{index:05d}-of-{count:05d}{path.suffix}")


def template_options(pairs: Sequence[str]) -> dict[str, Any]:
    """From key=value; values that are JSON (false, 3) mean that, others are texts."""
    found: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise InputError(f"--template-option: expected KEY=VALUE like enable_thinking=false, found {pair!r}")
        try:
            found[key] = json.loads(value)
        except ValueError:
            found[key] = value
    return found


def _settings(model: ModelOptions, options: AnswerOptions) -> dict[str, Any]:
    """What decides the texts, recorded in every line."""
    return {
        "model": model.target,
        "temperature": options.temperature,
        "seed": options.seed,
        "max_new_tokens": options.max_new_tokens,
        "template_options": dict(options.template_options),
        "chat_template": None if model.chat_template is None else text_fingerprint(_text(model.chat_template)),
    }


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot read: {getattr(error, 'strerror', None) or error}") from error


def _with_template(tokenizer: Any, chat_template: Path | None) -> Any:
    if chat_template is not None:
        tokenizer.chat_template = _text(chat_template)
    return tokenizer


def _load(model: ModelOptions, options: AnswerOptions, console: Console) -> tuple[Target, Sampler]:
    if model.drafter is not None and options.temperature > 0:
        raise InputError("--drafter speeds up greedy answers only; leave it out, or set --temperature 0")
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    placement = None if model.mesh is None else sharding.Placement(sharding.make_mesh(*model.mesh))
    with console.status(f"Loading {model.target}"):
        dtype = None if model.dtype is None else jnp.dtype(model.dtype)
        target = load_target(model.target, dtype=dtype, placement=placement)
        drafter = None
        if model.drafter is not None:
            loaded = load_drafter(model.drafter, target, placement=placement)
            print_warnings(console, loaded.warnings)
            drafter = loaded.model
        _with_template(target.tokenizer, model.chat_template)
    return target, Sampler(target.model, drafter, prefill_chunk=model.prefill_chunk, placement=placement)


@contextlib.contextmanager
def _bar(console: Console, what: str, total: int) -> Iterator[Callable[[AnswerReport], None]]:
    """A progress bar in chats, with tokens per second."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns, TextColumn("{task.fields[speed]}"), console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(what, total=total, speed="")

        def advance(report: AnswerReport) -> None:
            speed = f"{report.tokens / report.seconds:.0f} tokens/s" if report.seconds else ""
            done = report.resumed + report.written
            done += 0 if what == "Writing chats" else sum(report.left_out.values())
            bar.update(task, completed=done, speed=speed)

        yield advance


def _report_answers(
    path: Path, report: AnswerReport, more: Mapping[str, Any], json_file: Path | None, quiet: bool
) -> None:
    speed = report.tokens / report.seconds if report.seconds else 0.0
    if not quiet:
        rows = {"written": f"{report.written:,} chats to {path}", "there already": f"{report.resumed:,}"}
        rows |= {f"left out: {reason}": f"{n:,}" for reason, n in sorted(report.left_out.items())}
        _print_rows(rows | {"tokens": f"{report.tokens:,}", "tokens per second": f"{speed:.1f}"})
    values = dataclasses.asdict(report) | {"tokens_per_second": speed}
    write_json(json_file, {"output": str(path), **values, **more})


def _print_rows(rows: Mapping[str, str]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="dim")
    table.add_column()
    for name, value in rows.items():
        table.add_row(name.replace("_", " "), value)
    stdout().print(table, markup=False)
