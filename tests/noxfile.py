"""The matrix of supported releases: `make matrix`, or `nox -f tests/noxfile.py -s "tests(torch='2.14.1', ...)"`.

Each session is an environment of its own with the tests that need no GPU; all of them take hours on two cores.
"""

from __future__ import annotations

from pathlib import Path

import nox

ROOT = Path(__file__).parent.parent

nox.options.default_venv_backend = "venv"
nox.options.envdir = str(ROOT / ".nox")

TORCH = ("2.11.0", "2.13.0", "2.14.1", "2.15.0")
"""The oldest supported release, the one that is developed with, and later ones."""

FLASHINFER = ("0.7.2.post1", "0.7.4")
"""The oldest supported release and the newest one that was tried."""


@nox.session
@nox.parametrize("flashinfer", FLASHINFER)
@nox.parametrize("torch", TORCH)
def tests(session: nox.Session, torch: str, flashinfer: str) -> None:
    """Run all tests, or those that are named after `--`."""
    pinned = (f"torch=={torch}", f"flashinfer-python=={flashinfer}")
    session.chdir(ROOT)
    session.install(*pinned)
    session.install("--editable", ".[dev]", *pinned)
    session.run("python", "-m", "pytest", "-n", "2", "--dist", "worksteal", *session.posargs)
