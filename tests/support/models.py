"""Tensor-parallel models: one written by hand for parallelize_module, and Hugging Face's with their own plans."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.torch_version import TorchVersion

knows_plans = pytest.mark.skipif(
    TorchVersion(version("transformers")) < "5.24", reason="the plans are those of transformers 5.24 and later"
)
"""Marks tests that say what becomes of the plans of one release."""

SCALED_EMBEDDING = "folded_norm" if TorchVersion(torch.__version__) >= "2.13" else "norm"
"""The rule of an embedding that is scaled before its norm: torch 2.11's DTensor scales the parts, then adds them up."""

VOCABULARY, HIDDEN, HEADS = 128, 256, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        head = HIDDEN // HEADS
        q, k, v = (proj(x).unflatten(-1, (-1, head)).transpose(-2, -3) for proj in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-2, -3).flatten(-2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(HIDDEN, 512, bias=False), nn.Linear(HIDDEN, 512, bias=False)
        self.down = nn.Linear(512, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(HIDDEN, eps=1e-5), nn.RMSNorm(HIDDEN, eps=1e-5)
        self.attention, self.mlp = Attention(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """A Llama as people write it; takes token ids of [tokens] or [batch, tokens]."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


PLAN = {
    "attention.q": ColwiseParallel(),
    "attention.k": ColwiseParallel(),
    "attention.v": ColwiseParallel(),
    "attention.o": RowwiseParallel(),
    "mlp.gate": ColwiseParallel(),
    "mlp.up": ColwiseParallel(),
    "mlp.down": RowwiseParallel(),
}


def parallel_llama(mesh: DeviceMesh | None = None, dtype: torch.dtype = torch.bfloat16, layers: int = 2) -> Llama:
    """The hand-written Llama, sharded by parallelize_module, its embedding over the vocabulary."""
    torch.manual_seed(0)
    model = _with_random_norms(Llama(layers).to(dtype))
    mesh = mesh or init_device_mesh("cpu", (2,))
    parallelize_module(model.embedding, mesh, RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()))
    for layer in model.layers:
        parallelize_module(layer, mesh, PLAN)  # type: ignore[arg-type]
    return model


def _with_random_norms(model: nn.Module) -> nn.Module:
    """Norm weights that are not all one (or zero): with those, roundings at different places agree by chance."""
    generator = torch.Generator().manual_seed(4)
    for name, parameter in model.named_parameters():
        if "norm" in name and parameter.dim() == 1:
            noise = torch.randn(parameter.shape, generator=generator, device="cpu")
            parameter.data += 0.1 * noise.to(parameter)
    return model


COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip

DEEPSEEK = {
    "num_key_value_heads": 4, "moe_intermediate_size": 64, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 2, "first_k_dense_replace": 1, "q_lora_rank": 32, "kv_lora_rank": 32,
    "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip

GPT_OSS_PLAN = {
    "model.embed_tokens": "embedding_rowwise",
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.sinks": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.self_attn": "local_params",
}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 64}),
    "mistral": ("MistralConfig", {}),
    "gemma2": ("Gemma2Config", {"head_dim": 64}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 64}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "gpt_oss": ("GptOssConfig", {"head_dim": 64, "num_local_experts": 4}),
    "deepseek_v3": ("DeepseekV3Config", DEEPSEEK),
}


def hugging_face(name: str, plan: str | dict[str, str] = "auto", tp_size: int = 2) -> nn.Module:
    """A tiny random model of an architecture, sharded by transformers with the model's plan or another."""
    import transformers
    from transformers import AutoModelForCausalLM

    transformers.logging.set_verbosity_error()
    config_class, changes = CONFIGS[name]
    config = getattr(transformers, config_class)(**{**COMMON, **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager").eval()
    return distribute(model, plan, tp_size)


def distribute(model: Any, plan: str | dict[str, str] = "auto", tp_size: int = 2) -> nn.Module:
    """A model of transformers with random norm weights, sharded by transformers with a plan."""
    from transformers.distributed import DistributedConfig

    _with_random_norms(model)
    distributed, _, mesh = type(model).prepare_distribute_model(DistributedConfig(tp_size=tp_size, tp_plan=plan))
    return type(model).maybe_distribute_model(model, distributed, mesh)  # type: ignore[no-any-return]


def token_ids(*shape: int) -> Tensor:
    """Random token ids, the same on all ranks."""
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(2))
