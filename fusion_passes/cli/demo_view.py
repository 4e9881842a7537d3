"""What the demo shows on a terminal."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from rich.console import Console
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table

from fusion_passes.cli.explain_view import verdicts

if TYPE_CHECKING:
    from fusion_passes.cli.demo import Outcome


def show(console: Console, prompt: str, outcome: Outcome) -> None:
    """Print the verdicts, one block of the graph before and after, the two texts and the numbers."""
    console.print(verdicts(outcome.sites))
    for title, text in (("one block before", outcome.before), ("the same block after", outcome.after)):
        console.print(Panel(Syntax(text, "python", word_wrap=True, background_color="default"), title=title))
    console.print(Panel(prompt, title="prompt"))
    console.print(Panel(outcome.text, title="answer, fused"))
    console.print(Panel(outcome.text_stock, title="answer, stock torch.compile"))
    console.print(_numbers(outcome))
    for problem in outcome.problems:
        console.print(f"[red]problem:[/red] {problem}")


def _numbers(outcome: Outcome) -> Table:
    counts = Counter("fused" if site.fused else "left alone" for site in outcome.sites)
    table = Table(show_header=False, title="result")
    rows = {
        "device": outcome.device,
        "all-reduces fused": f"{counts['fused']} of {len(outcome.sites)}",
        "tokens generated": str(outcome.tokens),
        "texts": "equal" if outcome.text == outcome.text_stock else "different",
        "largest difference of a logit, fused - stock": f"{outcome.max_abs_logit_diff:.4g}",
        "error of the logits against float32 (rms), fused": f"{outcome.error:.4g}",
        "error of the logits against float32 (rms), eager": f"{outcome.error_eager:.4g}",
        "error of the logits against float32 (rms), stock": f"{outcome.error_stock:.4g}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table
