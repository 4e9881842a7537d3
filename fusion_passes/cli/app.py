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
    layers: Annotated[
        list[int], typer.Option(min=1, help="Layers to compile for the cost of the pass; repeat for several.")
    ] = [10, 100],  # noqa: B006
    png: Annotated[Path | None, typer.Option(help="Write a plot of the op sweep to this file.")] = None,
    json: Json = False,
) -> None:
    """Measure what the pass costs, and on two GPUs the op and a decoding step, with the pass against without."""
    from fusion_passes.cli import bench as command

    raise typer.Exit(command.run(hidden, batch, layers, png, json))


@app.command()
def explain(
    factory: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FACTORY",
            help="A function that returns (module, inputs), as my_package.my_model:make or path/to/my_model.py:make.",
        ),
    ],
    world_size: Annotated[int, typer.Option(min=1, help="Ranks of the process group that is made up.")] = 8,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; by default what torch is built for.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the graphs and verdicts to this page.")] = None,
    graph: Annotated[bool, typer.Option(help="Print the graphs, not only the verdicts.")] = True,
    strict: Annotated[bool, typer.Option("--strict", help="Fail if a fusion was missed.")] = False,
    json: Json = False,
) -> None:
    """Show what the pass does to a model, without a GPU, other processes or memory for its weights."""
    from fusion_passes.cli import explain as command

    raise typer.Exit(command.run(factory, world_size, device, html, graph, strict, json))
