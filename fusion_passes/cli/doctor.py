"""The doctor command: what this machine can fuse, as a table or as JSON."""

from __future__ import annotations

import json as jsonlib
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from fusion_passes import doctor

COLOURS = {"ok": "green", "note": "yellow", "fail": "red"}


def run(json: bool) -> int:
    """Examine and show; exit status 1 where something keeps everything from fusing."""
    findings = doctor.examine()
    fuses = doctor.can_fuse(findings)
    if json:
        print(jsonlib.dumps({"can_fuse": fuses, "findings": [asdict(finding) for finding in findings]}))
        return 0 if fuses else 1
    table = Table(show_header=False)
    for finding in findings:
        table.add_row(finding.name, f"[{COLOURS[finding.status]}]{finding.status}[/]", finding.text)
    console = Console()
    console.print(table)
    console.print("fusion can run here" if fuses else "nothing fuses here; see what failed above")
    return 0 if fuses else 1
