"""Tiny random models of every causal language model of transformers that has a tensor-parallel plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.support.capture import capture
from tests.support.models import VOCABULARY, distribute, token_ids

RELEASE = "5.24.0"
"""The release of transformers whose architectures these are."""

TORCH = "2.13.0"
"""The release of torch with which the table was made."""

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "rotary_dim": 8,
}
"""What makes a configuration small, for the attributes that it has."""

LATENT_ATTENTION = {"head_dim": 8, "num_key_value_heads": 4}
"""Further sizes where keys and values are kept in a latent space (the rotary part is a head of its own)."""

ROPE = {"rope_type": "default", "rope_theta": 1e4}

CHANGES: dict[str, dict[str, Any]] = {
    "BailingHybridForCausalLM": {"num_expert_group": 1, "num_experts_per_token": 2},
    "CohereCompassForCausalLM": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "DogeForCausalLM": {"num_key_value_heads": 4},
    "Dots1ForCausalLM": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "Dots3NoteForCausalLM": {"num_key_value_heads": 4},
    "Gemma3nForCausalLM": {
        "intermediate_size": [128, 128],
        "activation_sparsity_pattern": [0.0, 0.0],
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 16,
        "laurel_rank": 8,
    },
    "GraniteForCausalLM": {"residual_multiplier": 0.22},
    "KimiLinearForCausalLM": {"num_experts_per_token": 2},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "Mistral4ForCausalLM": {"head_dim": 16},
}
"""What an architecture needs beyond that."""


@dataclass(frozen=True)
class Row:
    """What became of one architecture.

    Attributes:
        name: of its class.
        all_reduces: in its compiled graphs.
        fused: rules and how often they served.
        left: reasons and how often they were given; or why the model cannot be traced.
    """

    name: str
    all_reduces: str
    fused: str
    left: str

    @property
    def fuses(self) -> bool:
        """Whether any all-reduce does."""
        return self.fused not in ("", "-")

    @property
    def reasons(self) -> set[str]:
        """Codes of those that do not."""
        return {part.split()[0] for part in self.left.split(", ") if part}

    def __str__(self) -> str:
        return f"| {self.name} | {self.all_reduces} | {self.fused} | {self.left} |"

    @classmethod
    def parse(cls, line: str) -> Row:
        """The row of a line of the table."""
        return cls(*(cell.strip() for cell in line.strip().strip("|").split("|")))


def measure(name: str) -> Row:
    """Trace an architecture up to the hook, between two ranks."""
    try:
        model = build(name)
        with torch.no_grad():
            model(token_ids(2, 16), use_cache=False)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        return Row(name, "-", "-", f"its own plan fails in eager mode: {str(error).splitlines()[0][:90]}")
    found = capture(lambda ids: model(ids, use_cache=False).logits, token_ids(2, 16), fullgraph=False)
    fused = Counter(site.rule for site in found.sites if site.rule)
    left = Counter(site.reason.code for site in found.sites if site.reason)
    graphs = f" in {len(found.before)} graphs" if len(found.before) > 1 else ""
    return Row(name, f"{len(found.sites)}{graphs}", counted(fused), counted(left))


def counted(counts: Counter[str]) -> str:
    """A cell of the table."""
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))


def architectures() -> list[str]:
    """Names of all `*ForCausalLM` classes whose configuration has a tensor-parallel plan."""
    import transformers

    names = [name for name in dir(transformers) if name.endswith("ForCausalLM") and not name.startswith("Auto")]
    return [name for name in names if getattr(_config_class(name), "base_model_tp_plan", None)]


def build(name: str, tp_size: int = 2) -> nn.Module:
    """A tiny random model of an architecture, sharded by transformers with the model's own plan."""
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    model = cls._from_config(_config(name), dtype=torch.bfloat16, attn_implementation="eager").eval()
    return distribute(model, tp_size=tp_size)


def _config_class(name: str) -> Any:
    import transformers

    return getattr(transformers, name).config_class


def _config(name: str) -> Any:
    cls = _config_class(name)
    known = cls().to_dict()
    small = {**SMALL, **(LATENT_ATTENTION if "qk_rope_head_dim" in known else {})}
    return cls(**{**{key: value for key, value in small.items() if key in known}, **CHANGES.get(name, {})})
