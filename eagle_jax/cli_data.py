"""`eagle-jax data <command>`: training data."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from eagle_jax.cli_options import Dtype, Json, Quiet, mesh_shape, numbers, reports_errors
from eagle_jax.errors import InputError

app = typer.Typer(help="Training data: the target's own chats, token ids with masks, the draft vocabulary.")


class Turns(StrEnum):
    all = "all"
    last = "last"
    each = "each"


TargetName = Annotated[str, typer.Option("--target", help="Folder, .gguf file, hub id, or smollm2-135m.")]
Output = Annotated[
    Path, typer.Option("--output", "-o", metavar="FILE", help="File of chats; continued if it is there.")
]
DtypeOption = Annotated[Dtype | None, typer.Option(help="Of all parameters; by default that of the target's files.")]
MeshOption = Annotated[str | None, typer.Option("--mesh", metavar="DATAxTENSOR", help="Device mesh, such as 1x4.")]
PrefillChunk = Annotated[int, typer.Option(min=1, help="Prompt tokens per forward pass.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Per answer.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Chats decoded together.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="Of the answers; 0 is greedy.")]
Seed = Annotated[int, typer.Option(help="Of all draws.")]
Shard = Annotated[
    str, typer.Option("--shard", metavar="I/N", help="This host's part; the file's name then says which.")
]
Unfinished = Annotated[
    bool, typer.Option("--keep-unfinished", help="Keep answers that met --max-new-tokens before they ended.")
]
ChatTemplate = Annotated[
    Path | None, typer.Option("--chat-template", metavar="FILE", help="Instead of the tokenizer's own.")
]
TemplateOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--template-option", metavar="KEY=VALUE", help="A switch of the chat template, such as enable_thinking=false."
    ),
]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse a file with an unusable line instead of skipping it.")]


def _shard(text: str) -> tuple[int, int]:
    found = numbers(text, "/", "--shard", "0/4")
    if len(found) != 2 or not 0 <= found[0] < found[1]:
        raise InputError(f"--shard: expected I/N with I from 0 to N - 1, like 0/4, found {text!r}")
    return found[0], found[1]


@app.command()
@reports_errors
def regenerate(
    target: TargetName,
    prompts: Annotated[
        Path, typer.Option(metavar="FILE", help='Lines of {"id", "turns"}, or chats whose answers are replaced.')
    ],
    output: Output,
    drafter: Annotated[str | None, typer.Option(help="Speeds up greedy answers; they stay the target's own.")] = None,
    max_new_tokens: MaxNewTokens = 512,
    batch_size: BatchSize = 8,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    keep_unfinished: Unfinished = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Answer only the first of the file.")] = None,
    shard: Shard = "0/1",
    strict: Strict = False,
    chat_template: ChatTemplate = None,
    template_option: TemplateOptions = None,
    dtype: DtypeOption = None,
    mesh: MeshOption = None,
    prefill_chunk: PrefillChunk = 256,
    json_file: Json = None,
    quiet: Quiet = False,
) -> None:
    """Let the target answer prompts, turn by turn. A second run goes on where the first was stopped."""
    part = _shard(shard)
    from eagle_jax import data_commands as commands
    from eagle_jax.data.regenerate import AnswerOptions

    commands.regenerate(
        commands.ModelOptions(target, drafter, dtype, mesh_shape(mesh), prefill_chunk, chat_template),
        prompts,
        output,
        AnswerOptions(
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            temperature=temperature,
            seed=seed,
            keep_unfinished=keep_unfinished,
            template_options=commands.template_options(template_option or []),
        ),
        shard=part,
        limit=limit,
        strict=strict,
        json_file=json_file,
        quiet=quiet,
    )


@app.command()
@reports_errors
def synthesize(
    target: TargetName,
    output: Output,
    count: Annotated[int, typer.Option(min=1, help="Chats to make, over all shards.")],
    turns: Annotated[int, typer.Option(min=1, help="User turns per chat, at most.")] = 1,
    user_temperature: Annotated[float, typer.Option(help="Of the user's turns; above 0.")] = 1.0,
    max_user_tokens: Annotated[int, typer.Option(min=1, help="Per user turn.")] = 256,
    system: Annotated[str | None, typer.Option(help="An instruction that steers what is asked.")] = None,
    max_new_tokens: MaxNewTokens = 512,
    batch_size: BatchSize = 8,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    keep_unfinished: Unfinished = False,
    shard: Shard = "0/1",
    chat_template: ChatTemplate = None,
    template_option: TemplateOptions = None,
    dtype: DtypeOption = None,
    mesh: MeshOption = None,
    prefill_chunk: PrefillChunk = 256,
    json_file: Json = None,
    quiet: Quiet = False,
) -> None:
    """Let the target write both sides: user turns are sampled, filtered, deduplicated, and answered."""
    part = _shard(shard)
    from eagle_jax import data_commands as commands
    from eagle_jax.data.regenerate import AnswerOptions
    from eagle_jax.data.synthesize import SynthesisOptions

    commands.synthesize(
        commands.ModelOptions(target, None, dtype, mesh_shape(mesh), prefill_chunk, chat_template),
        output,
        count,
        SynthesisOptions(turns=turns, temperature=user_temperature, max_new_tokens=max_user_tokens, system=system),
        AnswerOptions(
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
            temperature=temperature,
            seed=seed,
            keep_unfinished=keep_unfinished,
            template_options=commands.template_options(template_option or []),
        ),
        shard=part,
        json_file=json_file,
        quiet=quiet,
    )


@app.command()
@reports_errors
def prepare(
    chats: Annotated[list[Path], typer.Argument(metavar="CHATS...", help="Files of chats: messages or ShareGPT.")],
    target: TargetName,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Folder to write.")],
    max_length: Annotated[int, typer.Option(min=2, help="Tokens of a chat at most; the rest is cut off.")] = 2048,
    turns: Annotated[
        Turns, typer.Option(help="Train on all answers, on the last, or on each as the end of a chat of its own.")
    ] = Turns.all,
    skip: Annotated[int, typer.Option(min=0, help="Leave out the first chats.")] = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="Leave out the chats after so many.")] = None,
    chat_template: ChatTemplate = None,
    template_option: TemplateOptions = None,
    strict: Strict = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a folder of records.")] = False,
    json_file: Json = None,
    quiet: Quiet = False,
) -> None:
    """Turn chats into token ids, with the assistant's tokens marked."""
    from eagle_jax import data_commands as commands
    from eagle_jax.data.prepared import PrepareOptions

    options = commands.template_options(template_option or [])
    commands.prepare(
        target,
        chat_template,
        chats,
        output,
        PrepareOptions(max_length, turns.value, options, skip, limit),
        strict=strict,
        overwrite=overwrite,
        json_file=json_file,
        quiet=quiet,
    )


@app.command()
@reports_errors
def vocab(
    data: Annotated[Path, typer.Argument(metavar="FOLDER", help="As `prepare` wrote it.")],
    target: TargetName,
    size: Annotated[int, typer.Option(help="Tokens that a drafter can propose.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="JSON file to write.")],
    json_file: Json = None,
    quiet: Quiet = False,
) -> None:
    """Choose the draft vocabulary: the tokens that answers use most, end and special tokens always."""
    from eagle_jax import data_commands as commands

    commands.vocab(data, target, size, output, json_file=json_file, quiet=quiet)
