"""The commands and their arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
    help="Fuse all-reduce, residual add and RMSNorm of compiled tensor-parallel models.",
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on standard output.")]


@app.callback()
def main() -> None:
    """Fuse all-reduce, residual add and RMSNorm of compiled tensor-parallel models."""


@app.command()
def demo(
    prompt: Annotated[
        str, typer.Option(help="What the model is asked.")
    ] = "List the first ten letters of the alphabet.",
    tokens: Annotated[int, typer.Option(min=1, max=512, help="Tokens to generate.")] = 24,
    json: Json = False,
) -> None:
    """Run SmolLM2-135M-Instruct over two processes, compiled with and without the pass, and compare."""
    from fusion_passes.cli import demo as command

    raise typer.Exit(command.run(prompt, tokens, json))


@app.command()
def bench(
    hidden: Annotated[int, typer.Option(min=8, help="Hidden size of the op sweep.")] = 4096,
    batch: Annotated[list[int], typer.Option(help="Batch size of a decoding step; repeat for several.")] = [1, 16, 64],  # noqa: B006
    png: Annotated[Path | None, typer.Option(help="Write a plot of the op sweep to this file.")] = None,
    json: Json = False,
) -> None:
    """Measure the op and a decoding step on two GPUs, with the pass against without."""
    from fusion_passes.cli import bench as command

    raise typer.Exit(command.run(hidden, batch, png, json))
