"""The quantising ops: ranks, types, fakes, bad input, FlashInfer's kernels where there are some."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import custom_ops
from custom_ops import flashinfer_adapter, flashinfer_quant, formats, machine, quant_arguments, reference_quant
from custom_ops.quant_ops import OPS
from tests.support.programs import tensors

SCALE = torch.tensor(0.25)

CALLS: dict[str, Callable[[Tensor], Any]] = {
    "static": lambda x: custom_ops.scaled_fp8_quant(x, SCALE),
    "per token": custom_ops.scaled_fp8_quant,
    "per group": lambda x: custom_ops.scaled_fp8_quant(x, group_size=32),
    "MXFP8": custom_ops.mxfp8_quant,
    "MXFP8, linear": lambda x: custom_ops.mxfp8_quant(x, layout_code=2),
    "NVFP4": lambda x: custom_ops.scaled_fp4_quant(x, SCALE),
    "NVFP4, linear": lambda x: custom_ops.scaled_fp4_quant(x, SCALE, layout_code=2),
}


def as_bytes(tensor: Tensor) -> Tensor:
    """For comparison: torch compares no float8."""
    return tensor if tensor.dtype.itemsize > 1 else tensor.view(torch.uint8)


def same(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    """Whether values and scales are equal, bit for bit."""
    return all(torch.equal(as_bytes(x), as_bytes(y)) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("shape", [(64,), (5, 64), (2, 3, 64), (2, 1, 3, 64)], ids=str)
def test_leading_dimensions_are_rows(name: str, shape: tuple[int, ...]) -> None:
    (x,) = tensors(*shape, count=1)
    values, scales = CALLS[name](x)
    flat_values, flat_scales = CALLS[name](x.reshape(-1, 64))
    assert values.shape[:-1] == x.shape[:-1]
    assert torch.equal(as_bytes(values).view(flat_values.shape), as_bytes(flat_values))
    if name == "per token":
        assert scales.shape == (*x.shape[:-1], 1)
        scales = scales.view(-1, 1)
    assert torch.equal(as_bytes(scales), as_bytes(flat_scales))


@pytest.mark.parametrize("name", CALLS)
def test_values_are_those_of_the_reference(name: str) -> None:
    (x,) = tensors(5, 64, count=1)
    key = {"static": "fp8", "per token": "fp8_token", "per group": "fp8_group", "MXFP8": "mxfp8", "NVFP4": "nvfp4"}
    quantisation = formats.choose(key[name.split(",")[0]], group_size=32 if name == "per group" else None)
    expected, _ = reference_quant.quantise(x, quantisation, SCALE if quantisation.format.takes_scale else None)
    assert torch.equal(as_bytes(CALLS[name](x)[0]), as_bytes(expected))


@pytest.mark.parametrize("name", CALLS)
def test_layout_of_the_input_does_not_matter(name: str) -> None:
    (x,) = tensors(6, 4, 64, count=1)
    turned = x.transpose(0, 1)
    assert same(CALLS[name](turned), CALLS[name](turned.contiguous()))


@pytest.mark.parametrize("name", CALLS)
def test_no_rows(name: str) -> None:
    values, scales = CALLS[name](torch.empty(0, 64).bfloat16())
    assert values.shape[0] == 0
    assert scales.numel() in (0, 1)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled(name: str, dynamic: bool) -> None:
    compiled = torch.compile(CALLS[name], dynamic=dynamic, fullgraph=True)
    for rows in (5, 8, 130):
        (x,) = tensors(rows, 64, count=1)
        assert same(compiled(x), CALLS[name](x))


ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "scaled_fp8_quant.static": (SCALE,),
    "scaled_fp8_quant.per_token": (),
    "scaled_fp8_quant.per_group": (32,),
    "mxfp8_quant": (),
    "scaled_fp4_quant": (SCALE,),
}


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 64)], ids=str)
def test_opcheck(name: str, shape: tuple[int, ...]) -> None:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.custom_ops, packet), overload or "default")
    checks = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
    if name == "mxfp8_quant":  # what compares results in these has no float8_e8m0fnu
        checks = ["test_schema"]
    torch.library.opcheck(op, (*tensors(*shape, count=1), *ARGUMENTS[name]), test_utils=checks)


@pytest.mark.parametrize("layout", [None, 2])
def test_fake_of_mxfp8(layout: int | None) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    (x,) = tensors(5, 96, count=1)
    real = custom_ops.mxfp8_quant(x, layout_code=layout)
    with FakeTensorMode() as mode:
        fake = custom_ops.mxfp8_quant(mode.from_tensor(x), layout_code=layout)
    for a, b in zip(real, fake, strict=True):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)


def x(dtype: torch.dtype = torch.bfloat16, hidden: int = 64) -> Tensor:
    return torch.zeros(2, hidden, dtype=dtype)


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "scale of two elements": (lambda: custom_ops.scaled_fp8_quant(x(), torch.ones(2)), r"scale: shape \[2\], torch.float32"),
    "scale of another type": (
        lambda: custom_ops.scaled_fp8_quant(x(), torch.ones(1).bfloat16()), "scale: .*bfloat16.* must be one torch.float32",
    ),
    "scale and groups": (
        lambda: custom_ops.scaled_fp8_quant(x(), torch.ones(1), group_size=32), "scale and group_size=32: .* pass one",
    ),
    "group that does not divide": (lambda: custom_ops.scaled_fp8_quant(x(), group_size=48), "hidden size 64: .* 48 elements"),
    "group of nothing": (lambda: custom_ops.scaled_fp8_quant(x(), group_size=0), "block_quant_group_size=0: .* positive"),
    "MXFP8 of 48 columns": (lambda: custom_ops.mxfp8_quant(x(hidden=48)), "hidden size 48: in MXFP8 32 elements"),
    "NVFP4 of an odd row": (lambda: custom_ops.scaled_fp4_quant(x(hidden=63), SCALE), "hidden size 63: in NVFP4 16"),
    "NVFP4 of float32": (lambda: custom_ops.scaled_fp4_quant(x(torch.float32), SCALE), "torch.float32: NVFP4 is made of"),
    "layout that is not read": (lambda: custom_ops.mxfp8_quant(x(), layout_code=1), r"layout_code=1: .* 0 \(SWIZZLED"),
    "float64": (lambda: custom_ops.scaled_fp8_quant(x(torch.float64)), r"x: shape \[2, 64\] of torch.float64; pass"),
    "rank 0": (lambda: custom_ops.scaled_fp8_quant(torch.tensor(1.0)), r"x: shape \[\]"),
    "no columns": (lambda: custom_ops.scaled_fp8_quant(torch.empty(3, 0)), r"x: shape \[3, 0\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case: str) -> None:
    call, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        call()


def test_flashinfer_serves_block_formats_on_later_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_adapter, "version", lambda: "0.7.4")
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    for capability, served in (((9, 0), False), ((10, 0), True), ((12, 0), True), (None, False)):
        monkeypatch.setattr(machine, "capability", lambda device, capability=capability: capability)
        assert flashinfer_quant.serves(formats.choose("mxfp8"), cuda) is served
        assert flashinfer_quant.serves(formats.choose("nvfp4"), cuda) is served
        assert not flashinfer_quant.serves(formats.choose("fp8"), cuda)
        assert not flashinfer_quant.serves(formats.choose("mxfp8"), cpu)
    monkeypatch.setattr(flashinfer_adapter, "version", lambda: None)
    assert not flashinfer_quant.serves(formats.choose("mxfp8"), cuda)


@pytest.mark.parametrize("layout", [0, 2])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_flashinfer_is_called_as_its_signature_says(monkeypatch: pytest.MonkeyPatch, name: str, layout: int) -> None:
    import inspect

    from flashinfer import quantization

    target = {"mxfp8": "mxfp8_quantize", "nvfp4": "fp4_quantize"}[name]
    signature = inspect.signature(getattr(quantization, target))
    (activations,) = tensors(5, 96, count=1)
    quantisation = formats.choose(name, layout_code=layout)
    linear = reference_quant.quantise(activations, quantisation, SCALE)
    buffer = quantisation.scales(5, 96)
    assert buffer is not None
    scales = buffer.zeros(torch.device("cpu"))
    assert linear[1] is not None
    reference_quant.write_scales(linear[1], scales, quantisation)
    seen: list[dict[str, Any]] = []

    def fake(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        seen.append(dict(signature.bind(*args, **kwargs).arguments))
        return linear[0], scales.view(torch.uint8).flatten()

    monkeypatch.setattr(quantization, target, fake)
    monkeypatch.setattr(flashinfer_quant, "serves", lambda quantisation, device: True)
    call = custom_ops.mxfp8_quant if name == "mxfp8" else lambda x, **kw: custom_ops.scaled_fp4_quant(x, SCALE, **kw)
    found = call(activations, layout_code=layout)
    assert same(found, (linear[0], scales))
    assert seen[0]["is_sf_swizzled_layout"] is (layout == 0)
    assert seen[0]["input"] is not None
    assert ("global_scale" in seen[0]) == (name == "nvfp4")


def test_scale_on_another_device() -> None:
    with pytest.raises(
        ValueError, match=r"scale: shape \[1\], torch.float32 on meta; must be one torch.float32 on cpu"
    ):
        quant_arguments.check_scale("scale", torch.ones(1, device="meta"), torch.device("cpu"))
