"""What else must be equal on all ranks of a group before it runs fused: whoever compiles models says it here."""

from __future__ import annotations

_DECLARED: dict[str, set[str]] = {}
"""The registry: by name, everything that was said in this process."""


def declare(name: str, value: str) -> None:
    """Let the votes to come compare this, too; ranks that have not said the same run unfused, with the reason."""
    _DECLARED.setdefault(name, set()).add(value)


def facts() -> dict[str, object]:
    """Everything that was declared, in an order that does not depend on when."""
    return {name: sorted(values) for name, values in sorted(_DECLARED.items())}


def forget() -> None:
    """Forget all of it."""
    _DECLARED.clear()
