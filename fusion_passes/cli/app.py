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
    part: Annotated[list[str], typer.Option(help="pass, op, step or pdl; repeat for several.")] = [
        "pass",
        "op",
        "step",
    ],
    hidden: Annotated[int, typer.Option(min=8, help="Hidden size of the op sweep.")] = 4096,
    batch: Annotated[list[int], typer.Option(min=1, help="Tokens of a decoding step; repeat for several.")] = [
        1,
        16,
        64,
    ],
    model: Annotated[list[str], typer.Option(help="llama-8b, qwen3-30b-a3b or gemma3-12b; repeat for several.")] = [
        "llama-8b"
    ],
    attribute: Annotated[bool, typer.Option("--attribute", help="Say where the time of the steps goes.")] = False,
    layers: Annotated[
        list[int], typer.Option(min=1, help="Layers to compile for the cost of the pass; repeat for several.")
    ] = [10, 100],
    png: Annotated[Path | None, typer.Option(help="Write a plot of the op sweep to this file.")] = None,
    steps_png: Annotated[
        Path | None, typer.Option(help="Write a plot of where the time of the steps goes; implies --attribute.")
    ] = None,
    json: Json = False,
) -> None:
    """Measure what the pass costs and, on two GPUs or more, what it gains; by itself or under torchrun."""
    from fusion_passes.bench.stack import MODELS
    from fusion_passes.cli import bench as command

    for name, given, allowed in (("--part", part, command.PARTS), ("--model", model, tuple(MODELS))):
        if unknown := sorted(set(given) - set(allowed)):
            raise typer.BadParameter(f"{name} {unknown}: must be among {', '.join(allowed)}")
    asked = command.Asked(part, hidden, batch, model, attribute or steps_png is not None)
    raise typer.Exit(command.run(asked, layers, png, steps_png, json))


@app.command()
def tune(
    out: Annotated[Path, typer.Argument(help="The profile to write, JSON.")] = Path("tuning_profile.json"),
    hidden: Annotated[list[int] | None, typer.Option(min=8, help="Hidden size; repeat for several.")] = None,
    dtype: Annotated[list[str], typer.Option(help="bfloat16, float16 or float32; repeat.")] = ["bfloat16"],
    tokens: Annotated[list[int] | None, typer.Option(min=1, help="Rows; repeat for several.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write a plot of the measurements to this file.")] = None,
    json: Json = False,
) -> None:
    """Find the sizes up to which fusion pays on this machine's GPUs; FusionConfig(tuning_profile=...) uses them."""
    from fusion_passes.cli import tune as command

    raise typer.Exit(command.run(out, hidden, dtype, tokens, png, json))


@app.command()
def doctor(json: Json = False) -> None:
    """Say what this machine can fuse and what not, and why; exit status 1 where nothing fuses."""
    from fusion_passes.cli import doctor as command

    raise typer.Exit(command.run(json))


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
