"""Random small programs around all-reduces, for property tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

import custom_ops
from tests.support import quant_programs
from tests.support.programs import NORMS

c10d = torch.ops._c10d_functional

HIDDEN = 16
SHAPES = ((8, HIDDEN), (2, 4, HIDDEN))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FACTORS = (1.0, 0.5, 0.22, 2)
_NORMS = [NORMS[name](HIDDEN) for name in sorted(NORMS)]


@dataclass(frozen=True)
class Step:
    """One instruction: its kind, two values of those computed so far, and a choice whose meaning the kind knows."""

    kind: str
    a: int
    b: int
    choice: int


@dataclass(frozen=True)
class Program:
    """Instructions, and which of the values are returned beside the last.

    Attributes:
        dtypes: of the inputs, which have the shapes of SHAPES in turn.
        steps: instructions.
        returned: places of values that are returned, too.
        groups: names of process groups.
    """

    dtypes: tuple[torch.dtype, ...]
    steps: tuple[Step, ...]
    returned: frozenset[int]

    def inputs(self, seed: int = 0) -> list[Tensor]:
        """Activations, then what INSTRUCTIONS read as parameters: two weights of a norm, a bias and a matrix."""
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        activations = [random(*SHAPES[place % 2]).to(dtype) for place, dtype in enumerate(self.dtypes)]
        return [*activations, 1 + 0.1 * random(HIDDEN), random(HIDDEN), random(HIDDEN, HIDDEN) / HIDDEN**0.5]

    def __call__(self, groups: list[str], inputs: list[Tensor]) -> list[Tensor]:
        """Run in eager mode, or under a tracer."""
        count = len(self.dtypes)
        machine = Machine(groups, inputs[:count], *inputs[count:])
        values = list(inputs[:count])
        for step in self.steps:
            a, b = values[step.a % len(values)], values[step.b % len(values)]
            values.append(INSTRUCTIONS[step.kind](machine, a, b, step.choice))
        return [values[-1], *(values[place % len(values)] for place in sorted(self.returned))]


@dataclass(frozen=True)
class Machine:
    """What instructions may use beside their operands."""

    groups: list[str]
    activations: list[Tensor]
    weight: Tensor
    bias: Tensor
    matrix: Tensor


def _all_reduce(machine: Machine, a: Tensor, b: Tensor, choice: int) -> Tensor:
    # The operators themselves: they take a group by name under every tracer.
    group = machine.groups[choice % len(machine.groups)]
    return c10d.wait_tensor(c10d.all_reduce(a, "avg" if choice % 8 == 7 else "sum", group))  # type: ignore[no-any-return]


def _in_place_all_reduce(machine: Machine, a: Tensor, b: Tensor, choice: int) -> Tensor:
    mine = a.clone()
    return mine.copy_(_all_reduce(machine, mine, b, choice))


def _add(machine: Machine, a: Tensor, b: Tensor, choice: int) -> Tensor:
    other = b.reshape(a.shape)
    if choice % 4 == 3:
        return torch.add(a, other, alpha=2)
    return a + other if choice % 2 else other + a


def _add_in_float32(machine: Machine, a: Tensor, b: Tensor, choice: int) -> Tensor:
    return (a.float() + b.reshape(a.shape).float()).to(a.dtype)


def _norm(machine: Machine, a: Tensor, b: Tensor, choice: int) -> Tensor:
    norm = _NORMS[choice % len(_NORMS)]
    # Parameters reach a graph as inputs.
    weights = {"weight": machine.weight.to(a.dtype)}
    return torch.func.functional_call(norm, weights, a)  # type: ignore[no-any-return]


def _mutate(machine: Machine, a: Tensor, b: Tensor, choice: int) -> Tensor:
    into = machine.activations[choice % len(machine.activations)]
    into.copy_(a.reshape(into.shape))
    return a * 1


def _quantise(machine: Machine, a: Tensor, b: Tensor, choice: int) -> Tensor:
    """Quantised and back: its consumer sees values times scale."""
    scale = machine.bias[:1].abs() + 0.01
    static = (quant_programs.divide, quant_programs.multiply_by_reciprocal, quant_programs.multiply_in_bfloat16)
    rows = (quant_programs.rows_with_floor, quant_programs.compressed_tensors_rows, custom_ops.scaled_fp8_quant)
    if choice % 2:
        values, scale = rows[choice // 2 % 3](a)
    else:
        values = static[choice // 2 % 3](a, scale)
    return (values.float() * scale).to(a.dtype).reshape(a.shape)


INSTRUCTIONS: dict[str, Callable[[Machine, Tensor, Tensor, int], Tensor]] = {
    "all_reduce": _all_reduce,
    "in_place_all_reduce": _in_place_all_reduce,
    "add": _add,
    "add_in_float32": _add_in_float32,
    "norm": _norm,
    "layer_norm": lambda machine, a, b, choice: torch.nn.functional.layer_norm(a, (HIDDEN,)),
    "reshape": lambda machine, a, b, choice: a.reshape(SHAPES[choice % 2]),
    "bias": lambda machine, a, b, choice: a + machine.bias.to(a.dtype),
    "scale": lambda machine, a, b, choice: a * FACTORS[choice % len(FACTORS)],
    "divide": lambda machine, a, b, choice: a / 3,
    "linear": lambda machine, a, b, choice: a @ machine.matrix.to(a.dtype),
    "sine": lambda machine, a, b, choice: a.sin(),
    "gate": lambda machine, a, b, choice: a * b.reshape(a.shape).sigmoid(),
    "cast": lambda machine, a, b, choice: a.to(DTYPES[choice % len(DTYPES)]),
    "mutate": _mutate,
    "quantise": _quantise,
}
"""What a step may do."""

# Mostly what was computed last, so that chains form.
_RECENT = st.one_of(st.integers(-2, -1), st.integers(-6, 5))
_CHOICE = st.integers(0, 59)
_ANY = st.builds(Step, st.sampled_from(sorted(INSTRUCTIONS)), _RECENT, _RECENT, _CHOICE)
_LAST, _OLDER = st.just(-1), st.integers(-6, 2)
_BETWEEN = st.sampled_from(["bias", "scale", "divide", "reshape", "add", "sine", "cast"])
_SUM = st.builds(Step, st.sampled_from(["all_reduce", "all_reduce", "in_place_all_reduce"]), _RECENT, _RECENT, _CHOICE)
_CHAIN = st.tuples(
    _SUM.map(lambda step: (step,)),
    st.lists(st.builds(Step, _BETWEEN, _LAST, _OLDER, _CHOICE), max_size=1).map(tuple),
    st.lists(st.builds(Step, st.sampled_from(["add", "add_in_float32"]), _LAST, _OLDER, _CHOICE), max_size=1).map(
        tuple
    ),
    st.builds(Step, st.just("norm"), _LAST, _LAST, _CHOICE).map(lambda step: (step,)),
    st.lists(st.builds(Step, st.just("quantise"), st.integers(-2, -1), _LAST, _CHOICE), max_size=2).map(tuple),
).map(lambda parts: sum(parts, ()))
_BLOCK = st.one_of(_CHAIN, _CHAIN, _ANY.map(lambda step: (step,)))
_SAME = st.sampled_from(DTYPES).map(lambda dtype: (dtype,) * 3)
_MIXED = st.tuples(*[st.sampled_from(DTYPES)] * 3)

programs = st.builds(
    Program,
    dtypes=st.one_of(_SAME, _SAME, _MIXED),
    steps=st.lists(_BLOCK, min_size=1, max_size=4).map(lambda blocks: sum(blocks, ())),
    returned=st.frozensets(st.integers(0, 20), max_size=4),
)
"""Programs with a chance of all-reduces, additions and norms that follow each other."""
