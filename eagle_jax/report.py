"""Results for people (tables) and for programs (JSON files)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from eagle_jax.checkpoint.convert import ConvertReport, DiffReport, InspectReport
from eagle_jax.errors import InputError

if TYPE_CHECKING:  # training's libraries are an extra
    from eagle_jax.trainer.config import TrainConfig
    from eagle_jax.trainer.trainer import Outcome


def write_json(path: Path | None, value: Any) -> None:
    """Writes `value` to `path`, whole or not at all; does nothing without a path.

    Raises:
      InputError: the file cannot be written.
    """
    if path is None:
        return
    # Links and devices (/dev/stdout) are written through; renaming onto them would replace them.
    in_place = path.is_symlink() or (path.exists() and not path.is_file())
    partial = path if in_place else path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("w") as file:
            json.dump(value, file, indent=1)
            file.write("\n")
        if not in_place:
            os.replace(partial, path)
    except OSError as error:
        raise InputError(f"{path}: cannot write: {error.strerror or error}") from error
    finally:
        if not in_place:
            partial.unlink(missing_ok=True)


def stdout() -> Console:
    """Where tables go. A pipe or a file has no width of its own, so that nothing need be left out there."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=200)


def print_generate(console: Console, summary: dict[str, Any], baseline_compile_seconds: float | None) -> None:
    """The table after `generate`: speculation, and the plain run beside it when there was one."""
    baseline = summary.get("baseline")
    speculative = bool(summary["acceptance_per_position"])
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    table.add_column("speculative" if speculative else "plain", justify="right")
    if baseline:
        table.add_column("plain", justify="right")
    rows: list[tuple[str, ...]] = [
        ("output tokens", f"{summary['output_tokens']}", f"{summary['output_tokens']}"),
        ("rounds", f"{summary['rounds']}", ""),
    ]
    if speculative:
        rows.append(("mean acceptance length", f"{summary['mean_acceptance_length']:.2f}", "1.00"))
        for position, rate in enumerate(summary["acceptance_per_position"]):
            rows.append((f"acceptance at position {position}", f"{rate:.1%}", ""))
    rows.append(
        (
            "tokens per second",
            f"{summary['tokens_per_second']:.1f}",
            f"{baseline['tokens_per_second']:.1f}" if baseline else "",
        )
    )
    programs = f"{summary['compile_seconds']:.1f} s ({summary['num_compilations']})"
    rows.append(
        ("compiling (programs)", programs, f"{baseline_compile_seconds:.1f} s" if baseline_compile_seconds else "")
    )
    for row in rows:
        table.add_row(*row[: 3 if baseline else 2])
    console.print(table)
    if baseline:
        console.print(
            f"speed-up [bold]{summary['speedup']:.2f}x[/bold]; {baseline['identical_outputs']} of "
            f"{baseline['total_outputs']} outputs identical to plain decoding",
            highlight=False,
        )


def print_convert(console: Console, report: ConvertReport) -> None:
    console.print(
        f"{escape(report.destination)}: {report.layout} layout from {report.source_layout}, {report.tensors} tensors, "
        f"{report.parameters:,} parameters, {report.dtype or 'dtypes kept'}; read back and compared",
        highlight=False,
        soft_wrap=True,
    )
    print_warnings(console, report.warnings)


def print_inspect(console: Console, report: InspectReport) -> None:
    config = report.config
    console.print(f"[bold]{escape(report.source)}[/bold]", highlight=False, soft_wrap=True)
    facts = Table(box=None, pad_edge=False, show_header=False)
    facts.add_column(style="dim")
    facts.add_column()
    captured = "not stored" if report.captured_inputs is None else f"{report.captured_inputs} as block inputs"
    if report.captured_outputs is not None:
        captured += f", {report.captured_outputs} as block outputs"
    switches = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")
    tables = [name for name in ("embedding", "head") if config[f"own_{name}"]]
    for name, value in (
        ("kind", report.kind),
        ("layout", f"{report.layout_title} ({report.detected_by})"),
        ("switches", ", ".join(f"{name} {'on' if config[name] else 'off'}" for name in switches)),
        ("captured layers", captured),
        ("widths", f"target {config['target_hidden_size']}, drafter {config['block']['hidden_size']}"),
        ("blocks", str(config["num_layers"])),
        ("vocabulary", f"{config['draft_vocab_size']} of the target's {config['vocab_size']}"),
        ("own tables", " and ".join(tables) or "none: the target's are shared"),
        ("size", f"{report.parameters:,} parameters, {report.bytes / 1e6:.1f} MB"),
    ):
        facts.add_row(name, escape(value))
    console.print(facts)
    table = _tensors(report, stored=True)
    if console.measure(table, options=console.options.update(max_width=10_000)).maximum > console.width:
        table = _tensors(report, stored=False)  # of no use cut short; the JSON result has it
    console.print(table)
    print_warnings(console, report.warnings)


def _tensors(report: InspectReport, *, stored: bool) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("tensor", *(("stored as",) if stored else ()), "shape", "dtype"):
        table.add_column(title, no_wrap=True)
    for tensor in report.tensors:
        names = (", ".join(tensor.stored),) if stored else ()
        table.add_row(tensor.path, *names, str(tensor.shape), tensor.dtype)
    return table


def print_diff(console: Console, report: DiffReport) -> None:
    for field, (left, right) in report.config.items():
        console.print(f"{field}: {left} and {right}", highlight=False, markup=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("tensor", no_wrap=True)
    table.add_column("max |a-b|", justify="right")
    table.add_column("status")
    for tensor in report.tensors:
        largest = "" if tensor.max_abs is None else f"{tensor.max_abs:.3g}"
        table.add_row(tensor.path, largest, escape(tensor.detail or tensor.status.replace("_", " ")))
    console.print(table)
    console.print("equal" if report.equal else "different", style="bold green" if report.equal else "bold red")


def print_warnings(console: Console, warnings: list[str]) -> None:
    for warning in warnings:
        console.print(f"[yellow]warning:[/yellow] {escape(warning)}", highlight=False, soft_wrap=True)


def print_train(console: Console, config: TrainConfig, outcome: Outcome) -> None:
    total = config.optimizer.total_steps
    state = "finished" if outcome.finished else f"saved at step {outcome.step} of {total}; start it again to go on"
    console.print(f"{escape(str(config.run))}: {state}", highlight=False, soft_wrap=True)
    figures = outcome.figures
    if figures:
        table = Table(box=None, pad_edge=False)
        for title in ("held out, step", "loss", "acceptance", "prefix"):
            table.add_column(title, justify="right")
        for k, (loss, hit, prefix) in enumerate(
            zip(figures["loss"], figures["acceptance"], figures["prefix_acceptance"], strict=True)
        ):
            table.add_row(str(k), f"{loss:.3f}", f"{hit:.1%}", f"{prefix:.1%}")
        console.print(table)
        console.print(f"simulated acceptance length {figures['simulated_acceptance_length']:.2f}", highlight=False)
    if "decoded_acceptance_length" in figures:
        console.print(f"in the decode loop {figures['decoded_acceptance_length']:.2f}", highlight=False)
    for folder in outcome.exported:
        console.print(f"exported {escape(str(folder))}", highlight=False, soft_wrap=True)
