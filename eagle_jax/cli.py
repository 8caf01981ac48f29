"""`eagle-jax <command>`: parse, call one library function, print what it found.

Heavy imports wait until a command runs, so that `--help` answers at once. A user's mistake is one line on stderr and
exit code 2, never a traceback.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from eagle_jax import cli_data
from eagle_jax.cli_options import Dtype, Json, Quiet, fail, mesh_shape, numbers, reports_errors, status
from eagle_jax.errors import InputError

app = typer.Typer(
    help="EAGLE-3.1 speculative decoding for JAX and TPU.",
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(cli_data.app, name="data")


class StoredDtype(StrEnum):
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


class Layout(StrEnum):
    safeailab = "safeailab"
    vllm = "vllm"
    sglang = "sglang"
    speculators = "speculators"
    orbax = "orbax"


class NormOutputMeaning(StrEnum):
    feedback = "feedback"
    specforge = "specforge"


SourceLayout = Annotated[
    str | None, typer.Option("--source-layout", help="Read SRC in this layout instead of finding out which it is.")
]
Meaning = Annotated[
    NormOutputMeaning,
    typer.Option(
        help="What the file's norm_output means: the normed state is fed back (vLLM, SGLang, speculators), or only the "
        "head is normed (drafters trained by SpecForge before that changed)."
    ),
]


@app.command()
@reports_errors
def generate(
    target: Annotated[str, typer.Option(help="Folder, .gguf file, hub id, or smollm2-135m.")],
    drafter: Annotated[str, typer.Option(help="Folder or hub id of an EAGLE-3 or 3.1 drafter; none decodes plainly.")],
    prompt: Annotated[str | None, typer.Option(help="One prompt; the answer is printed as it is accepted.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help='Lines of {"id", "turns": [text, ...]}; the first turn is answered.')
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    num_draft_tokens: Annotated[int, typer.Option(min=1, help="Draft tokens per round.")] = 4,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts decoded together.")] = 1,
    dtype: Annotated[
        Dtype | None, typer.Option(help="Of all parameters; by default that of the target's files.")
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Also decode plainly, and report the speed-up.")] = False,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="End tokens end nothing.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Answer only the first prompts of the file.")] = None,
    prefill_chunk: Annotated[int, typer.Option(min=1, help="Prompt tokens per forward pass.")] = 256,
    mesh: Annotated[str | None, typer.Option(metavar="DATAxTENSOR", help="Device mesh, such as 1x4.")] = None,
    replicate_drafter: Annotated[
        bool, typer.Option("--replicate-drafter", help="Keep the drafter whole on every device of the mesh.")
    ] = False,
    norm_output_meaning: Meaning = NormOutputMeaning.feedback,
    json_file: Json = None,
    quiet: Quiet = False,
) -> None:
    """Answer prompts with a drafter speculating for the target. Greedy: the output is the target's own."""
    if (prompt is None) == (prompts is None):
        raise InputError("give either --prompt TEXT or --prompts FILE")
    if compare and drafter == "none":
        raise InputError("--compare needs a drafter: without one there is only the plain run")
    if prompt is not None and not prompt.strip():
        raise InputError("--prompt is empty")
    from eagle_jax import commands

    commands.generate(
        commands.GenerateOptions(
            target=target,
            drafter=None if drafter == "none" else drafter,
            prompt=prompt,
            prompts=prompts,
            max_new_tokens=max_new_tokens,
            num_draft_tokens=num_draft_tokens,
            batch_size=batch_size,
            dtype=dtype,
            compare=compare,
            ignore_eos=ignore_eos,
            limit=limit,
            prefill_chunk=prefill_chunk,
            mesh=mesh_shape(mesh),
            replicate_drafter=replicate_drafter,
            norm_output_meaning=norm_output_meaning.value,
        ),
        json_file=json_file,
        quiet=quiet,
    )


@app.command()
@reports_errors
def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Folder or hub id of a drafter, in any layout.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="Folder to write.")],
    layout: Annotated[Layout, typer.Option(help="Who will read it.")],
    dtype: Annotated[StoredDtype | None, typer.Option(help="By default every tensor keeps its own.")] = None,
    target: Annotated[str | None, typer.Option(help="Name of the target, which speculators' layout records.")] = None,
    source_layout: SourceLayout = None,
    norm_output_meaning: Meaning = NormOutputMeaning.feedback,
    capture_layers: Annotated[
        str | None, typer.Option(metavar="I,J,K", help="Captured layers as block inputs, instead of what SRC says.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a drafter that DST holds.")] = False,
    json_file: Json = None,
    quiet: Quiet = False,
) -> None:
    """Convert a drafter into another layout. What is written is read back and compared before it appears."""
    ids = None if capture_layers is None else tuple(numbers(capture_layers, ",", "--capture-layers", "2,15,27"))
    from eagle_jax.checkpoint.convert import convert as run
    from eagle_jax.checkpoint.hub import resolve
    from eagle_jax.report import print_convert, stdout, write_json

    with status(quiet, f"Converting {source}"):
        report = run(
            resolve(source),
            destination,
            layout.value,
            dtype=dtype,
            source_layout=source_layout,
            norm_output_meaning=norm_output_meaning.value,
            capture_layers=ids,
            target=target,
            overwrite=overwrite,
        )
    if not quiet:
        print_convert(stdout(), report)
    write_json(json_file, report.to_json())


@app.command()
@reports_errors
def inspect(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Folder or hub id of a drafter.")],
    source_layout: SourceLayout = None,
    norm_output_meaning: Meaning = NormOutputMeaning.feedback,
    json_file: Json = None,
    quiet: Quiet = False,
) -> None:
    """Say what a drafter is: layout, switches, captured layers, shapes, dtypes, warnings."""
    from eagle_jax.checkpoint.convert import inspect as run
    from eagle_jax.checkpoint.hub import resolve
    from eagle_jax.report import print_inspect, stdout, write_json

    with status(quiet, f"Reading {source}"):
        report = run(resolve(source), layout=source_layout, norm_output_meaning=norm_output_meaning.value)
    if not quiet:
        print_inspect(stdout(), report)
    write_json(json_file, report.to_json())


@app.command()
@reports_errors
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="Folder or hub id of a drafter.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Folder or hub id of another.")],
    norm_output_meaning: Meaning = NormOutputMeaning.feedback,
    json_file: Json = None,
    quiet: Quiet = False,
) -> None:
    """Compare two drafters tensor by tensor, whatever their layouts. Exit code 1 when they differ."""
    from eagle_jax.checkpoint.convert import diff as run
    from eagle_jax.checkpoint.hub import resolve
    from eagle_jax.report import print_diff, stdout, write_json

    with status(quiet, f"Comparing {a} and {b}"):
        report = run(resolve(a), resolve(b), norm_output_meaning=norm_output_meaning.value)
    if not quiet:
        print_diff(stdout(), report)
    write_json(json_file, report.to_json())
    raise typer.Exit(0 if report.equal else 1)


@app.command()
@reports_errors
def train(
    recipe: Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="The recipe.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys to change, such as loss.steps=5.")
    ] = None,
    json_file: Json = None,
    quiet: Quiet = False,
) -> None:
    """Train a drafter. Started again, it goes on from its last checkpoint; SIGTERM and Ctrl-C save first."""
    from eagle_jax.report import print_train, stdout, write_json
    from eagle_jax.trainer.config import read_config
    from eagle_jax.trainer.run import train as run

    config = read_config(recipe, overrides or ())
    outcome = run(config, Console(stderr=True, quiet=quiet))
    if not quiet:
        print_train(stdout(), config, outcome)
    report = {"step": outcome.step, "finished": outcome.finished, "figures": outcome.figures}
    write_json(json_file, report | {"run": str(config.run), "exported": [str(path) for path in outcome.exported]})


# typer exports one kind of usage error; its base class is all of them.
_UsageError: Any = typer.BadParameter.__bases__[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that lacks a character shows a question mark
            stream.reconfigure(errors="replace")
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return app(arguments or ["--help"], prog_name="eagle-jax", standalone_mode=False) or 0
    except _UsageError as error:
        command = error.ctx.command_path if error.ctx is not None else "eagle-jax"
        fail(f"{error.format_message().rstrip('.')} (see {command} --help)")
        return 2
