"""Which tensors share memory."""

from __future__ import annotations

from torch import Tensor


def check(inputs: dict[str, Tensor | None], outputs: dict[str, Tensor]) -> None:
    """An output may be an input, exactly; two outputs, or shifted views of one memory, would overwrite each other.

    Raises:
        ValueError: naming both.
    """
    written: dict[str, Tensor] = {}
    for name, tensor in outputs.items():
        for other, value in {**inputs, **written}.items():
            if value is None or not _meet(tensor, value):
                continue
            same = tensor.data_ptr() == value.data_ptr() and reach(tensor) == reach(value)
            if other in written or not same or not value.is_contiguous():
                raise ValueError(f"{name} overlaps {other}; pass a tensor of its own, or exactly that input")
        written[name] = tensor


def _meet(a: Tensor, b: Tensor) -> bool:
    if not a.numel() or not b.numel():
        return False
    return a.data_ptr() < b.data_ptr() + reach(b) and b.data_ptr() < a.data_ptr() + reach(a)


def reach(tensor: Tensor) -> int:
    """Bytes from the first to the last element."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
