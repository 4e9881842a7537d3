"""The explain command: what the pass does to a model, on a terminal, as JSON, or as a page."""

from __future__ import annotations

import importlib
import importlib.util
import json as jsonlib
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from fusion_passes.cli import explain_page, explain_view
from fusion_passes.inspection import FactoryError, Inspection, inspect_factory

STATUS = Console(stderr=True)


class UnknownFactory(ValueError):
    """A name that leads to no function."""


def run(
    factory: str, world_size: int, device: str | None, html: Path | None, graph: bool, strict: bool, json: bool
) -> int:
    """Inspect and show; the exit status is 0 if there is an all-reduce, and with strict none was missed."""
    try:
        make = load(factory)
        with STATUS.status("compiling up to the pass"):
            found = inspect_factory(make, world_size=world_size, device=device)
    except (UnknownFactory, FactoryError) as error:
        STATUS.print(str(error), markup=False, highlight=False)
        return 2
    if html is not None:
        html.write_text(explain_page.render(found, factory), encoding="utf-8")
        STATUS.print(f"wrote {html}", markup=False, highlight=False)
    if json:
        print(jsonlib.dumps(as_dict(found)))
    else:
        explain_view.show(Console(), found, graph)
    if not found.sites:
        STATUS.print("no all-reduce in any graph: is the model sharded, and does it run its collectives inside?")
        return 1
    return 1 if strict and any(site.missed for site in found.sites) else 0


def load(name: str) -> Callable[[], Any]:
    """The function of "module:function" or "file.py:function".

    Raises:
        UnknownFactory: there is no such module, file or function.
    """
    place, _, function = name.rpartition(":")
    if not place or not function:
        raise UnknownFactory(f"{name!r}: must be MODULE:FACTORY, such as my_model:make or path/to/my_model.py:make")
    module = _from_file(Path(place)) if place.endswith(".py") else _from_name(place)
    found = getattr(module, function, None)
    if not callable(found):
        raise UnknownFactory(f"{name!r}: {place} has no function {function!r}")
    return found  # type: ignore[no-any-return]


def as_dict(found: Inspection) -> dict[str, Any]:
    """What the page and the terminal show, as plain data."""
    return {
        "device": found.device,
        "world_size": found.world_size,
        "notes": list(found.notes),
        "all_reduces": len(found.sites),
        "fused": sum(site.fused for site in found.sites),
        "missed": sum(site.missed for site in found.sites),
        "sites": [asdict(site) for site in found.sites],
        "before": found.before,
        "after": found.after,
    }


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise UnknownFactory(f"{path}: no such file")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _from_name(name: str) -> Any:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise UnknownFactory(f"{name}: no such module; the working directory is searched first") from None
