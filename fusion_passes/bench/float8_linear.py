"""A linear layer in FP8 as people write it in plain PyTorch: quantise the input, multiply with `_scaled_mm`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

MAX = 448.0


class Float8Linear(nn.Module):
    """y = x @ weight.T with weight and input in float8_e4m3fn.

    Args:
        source: the layer whose weight is taken.
        per_token: whether each row of the input has a scale of its own; otherwise one is given for all of it.
        input_scale: that scale, float32 []; several layers may share it.
    """

    def __init__(self, source: nn.Linear, per_token: bool, input_scale: Tensor) -> None:
        super().__init__()
        self.per_token = per_token
        wide = source.weight.detach().float()
        # Rows of the weight get a scale of their own where rows of the input do: the product takes both or neither.
        scale = wide.abs().amax(1 if per_token else (0, 1), keepdim=True) / MAX
        self.weight = nn.Buffer((wide / scale).clamp(-MAX, MAX).to(torch.float8_e4m3fn))
        self.weight_scale = nn.Buffer(scale.t().contiguous() if per_token else scale.reshape(()))
        self.input_scale = nn.Buffer(input_scale)

    def forward(self, x: Tensor) -> Tensor:
        """[..., out_features] of [..., in_features], in the type of x."""
        rows = x.reshape(-1, x.shape[-1])
        if self.per_token:
            scale = rows.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448.0
        else:
            scale = self.input_scale
        values = (rows.float() / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        y = torch._scaled_mm(values, self.weight.t(), scale, self.weight_scale, out_dtype=x.dtype)
        return y.view(*x.shape[:-1], -1)


def quantise_linears(module: nn.Module, per_token: bool, input_scale: float = 0.02) -> None:
    """Replace all linear layers of a module, which then share one scale of their inputs."""
    (device, *_) = {parameter.device for parameter in module.parameters()}
    scale = torch.tensor(input_scale, device=device)
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, Float8Linear(child, per_token, scale))
