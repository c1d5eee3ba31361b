"""Machines by what they achieve: published figures of prefill, and a modelled decoder where nobody has timed one.

Prefill of GPUs is a peak times an efficiency that was fitted to published measurements (one request at a time unless
said otherwise; operations counted as ``Model.prefill_flops`` does):

* A100 80 GB SXM, 0.6 of 312 TFLOP/s: a bfloat16 model of Llama-3.1-8B's shape takes 48.3 ms for 500 tokens. NVIDIA,
  "Llama 3.1 Nemotron Safety Guard Multilingual 8B V1 NIM Performance" 1.10.1, docs.nvidia.com, table 500_10,
  concurrency 1. FlashAttention-2 (arXiv 2307.08691) states 50 to 73 % of the peak for attention on this GPU.
* H100 SXM, 0.5 of 989 TFLOP/s, or of 1979 where weights have 8 bits: two of them take 407 ms for 5000 and 48 ms for 500
  tokens of Llama-3.3-70B in FP8. NVIDIA, "NIM LLMs Benchmarking: Performance" 1.0.0, docs.nvidia.com,
  Llama-3.3-70b-instruct, version 1.8.0, 2 x H100 80G, fp8 TP2, concurrency 1. That bfloat16 reaches the same share is
  an assumption. It agrees with 128 of them taking 77 s for a million tokens of Llama-3-405B ("Context Parallelism for
  Scalable Million-Token Inference", arXiv 2411.01783, abstract): 0.51 of the peak, mostly attention.
* H200: the H100's arithmetic with more and faster memory, as NVIDIA's data sheets have it; efficiency assumed equal.
* Mixtures of experts on H100 and H200, 0.26, communication included: 52,300 input tokens a second for a node of eight
  H100, DeepSeek-V3 in FP8, prompts of 2000 tokens. "Deploying DeepSeek with PD Disaggregation and Large-scale Expert
  Parallelism on 96 H100 GPUs", lmsys.org, 5 May 2025. That is many requests at a time; a lone one is slower.
  DeepSeek's own report (73,700 a second for a node of H800, 56 % of them from a cache) lies below.

Groups split every layer (tensor parallelism). Added for each layer: two ring all-reduces of a token's hidden state over
NVLink at its stated speed, not overlapped; modelled. Every pass reads all weights once, before it computes; modelled,
and it leaves 4 to 6 % over the measurements above.

Decoding on a GPU is modelled: docs/gpu.md says what the kernels do, and nobody has timed them. One GPU of a group
decodes. For each element, the matrix products that docs/gpu.md names (groups of 4096 elements, 36 % of coefficients
coded, 512 token features) at 40 % of the peak, and three passes over the output at memory speed. For each byte, a copy
to the device at 25 GB/s and the host's checks at 10 GB/s. For each chunk, 2 ms: launches, and a lane of 8,192 symbols
that one thread walks. Linking is part of the last kernel's store, hence free.

Steering was measured on one core of a server processor with Python 3.11: the controller's part over whole loads by
``benchmarks/decision_time.py``, the fetcher's, without what each byte takes, by ``benchmarks/object_reads.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError, NotFoundError

from ..costs import CostModel, DecodeCost, PrefillCost
from .models import BF16_BYTES, DEMO
from .steering import FREE, Steering

if TYPE_CHECKING:
    from .models import Model

_GROUP_WIDTH, _CODED, _FEATURES = 4096, 0.36, 512
_DECODE_FLOPS = 2 * (_GROUP_WIDTH * _CODED + _FEATURES)
"""Operations for each decoded element, from the floors in docs/gpu.md."""
_DECODE_EFFICIENCY = 0.4
_DECODE_PASSES = 3
_DECODE_BASE_S = 2e-3
_COPY_BYTES_S = 25e9
_CHECK_BYTES_S = 10e9
_STEERING = Steering(event_s=4.0e-5, decided_s=2.5e-4, request_s=1.0e-4)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One kind of processor, or a group of them that computes together.

    Attributes:
        name: For tables and logs.
        processors: In the group.
        workers: 1: decoding and recomputing take turns; 2: they run side by side.
        bf16_flops: Dense peak of one processor, operations a second.
        fp8_flops: Likewise in fp8.
        memory_bytes: Of one processor.
        memory_bytes_s: Bytes a second of one processor's memory.
        wire_bytes_s: Between processors, each way.
        efficiency: Share of the peak that prefill reaches in matrix products.
        attention_efficiency: Share of the peak in attention.
        expert_efficiency: Share of the peak in mixtures of experts.
        launch_s: Fixed part of a forward pass.
        chunk_decode_s: Seconds of decoding for each chunk.
        element_decode_s: Seconds of decoding for each element.
        byte_decode_s: Seconds of decoding for each fetched byte.
        link_element_s: Seconds of linking for each element.
        steering: What the controller and its driver take on the machine's processor; nothing where nobody measured it.
    """

    name: str
    processors: int = 1
    workers: int = 2
    bf16_flops: float
    fp8_flops: float
    memory_bytes: float
    memory_bytes_s: float
    wire_bytes_s: float
    efficiency: float
    attention_efficiency: float
    expert_efficiency: float
    launch_s: float
    chunk_decode_s: float
    element_decode_s: float
    byte_decode_s: float
    link_element_s: float = 0.0
    steering: Steering = FREE

    def group(self, processors: int) -> Machine:
        """Several of these as one machine."""
        if self.processors != 1 or processors < 1:
            raise ArgumentError(f"a group is made of one or more single machines, not {processors} of {self.name}")
        return replace(self, name=f"{processors}x{self.name}", processors=processors)


def costs(model: Model, machine: Machine, *, raw: bool = False, joins: bool = False) -> CostModel:
    """What a model costs on a machine; the question's tokens are the caller's to set.

    Args:
        model: Shape of the model.
        machine: The machine.
        raw: The caches lie as plain bfloat16, so that decoding is a copy.
        joins: Passes of several loads may run as one, which is modelled: it reads the weights once, and computes its
            padding as well.

    Returns:
        The costs, for a question of no tokens.

    Raises:
        ArgumentError: The weights do not fit into the machine's memory.
    """
    if model.parameters * model.weight_bytes > machine.processors * machine.memory_bytes:
        raise ArgumentError(f"{model.name} does not fit into the memory of {machine.name}; choose a larger group")
    decode = _copying(machine) if raw else _decoding(model, machine)
    prefill = _prefill(model, machine)
    linking_s = machine.link_element_s * model.cache_elements
    return CostModel(prefill, decode, linking_s, joined=prefill if joins else None)


def _prefill(model: Model, machine: Machine) -> PrefillCost:
    count = machine.processors
    peak = machine.bf16_flops if model.weight_bytes >= BF16_BYTES else machine.fp8_flops
    efficiency = machine.expert_efficiency if model.experts else machine.efficiency
    # Experts' efficiency was measured with all communication in it.
    reduced = 0 if model.experts else 2 * model.layers * model.hidden * BF16_BYTES
    return PrefillCost(
        base_s=machine.launch_s + model.parameters * model.weight_bytes / (count * machine.memory_bytes_s),
        token_s=model.token_flops / (count * peak * efficiency)
        + reduced * 2 * (count - 1) / count / machine.wire_bytes_s,
        pair_s=model.pair_flops / (count * machine.bf16_flops * machine.attention_efficiency),
    )


def _decoding(model: Model, machine: Machine) -> DecodeCost:
    return DecodeCost(machine.chunk_decode_s, machine.element_decode_s * model.cache_elements, machine.byte_decode_s)


def _copying(machine: Machine) -> DecodeCost:
    """Raw bytes on a GPU cross the bus once, on a CPU they are copied once."""
    return DecodeCost(0.0, 0.0, 1 / min(machine.memory_bytes_s / 2, _COPY_BYTES_S))


def _gpu(
    name: str, *, bf16: float, fp8: float, memory: float, memory_bytes_s: float, wire_bytes_s: float, efficiency: float
) -> Machine:
    return Machine(
        name=name,
        bf16_flops=bf16,
        fp8_flops=fp8,
        memory_bytes=memory,
        memory_bytes_s=memory_bytes_s,
        wire_bytes_s=wire_bytes_s,
        efficiency=efficiency,
        attention_efficiency=efficiency,
        expert_efficiency=0.26,
        launch_s=0.0,
        chunk_decode_s=_DECODE_BASE_S,
        element_decode_s=_DECODE_FLOPS / (_DECODE_EFFICIENCY * bf16) + _DECODE_PASSES * BF16_BYTES / memory_bytes_s,
        byte_decode_s=1 / _COPY_BYTES_S + 1 / _CHECK_BYTES_S,
        steering=_STEERING,
    )


# Peaks, memory and NVLink (each way) as in NVIDIA's data sheets of the SXM modules.
A100 = _gpu("a100", bf16=312e12, fp8=312e12, memory=80e9, memory_bytes_s=2.039e12, wire_bytes_s=300e9, efficiency=0.6)
H100 = _gpu("h100", bf16=989e12, fp8=1979e12, memory=80e9, memory_bytes_s=3.35e12, wire_bytes_s=450e9, efficiency=0.5)
H200 = _gpu("h200", bf16=989e12, fp8=1979e12, memory=141e9, memory_bytes_s=4.8e12, wire_bytes_s=450e9, efficiency=0.5)

_CPU_MEMORY_BYTES_S = 10e9
# Measured with the demonstration's model on two cores of a server processor: a pass takes 8.9 ms, 95 us for each token
# and 0.14 us for each pair; a chunk's decoding 1.07 ms, 11 us for each token and 0.13 us for each byte; linking 2.2 us
# for each token. Other models are scaled by operations and elements. The peak is what the model reached, so that the
# efficiency is 1.
_CPU_FLOPS = DEMO.token_flops / 9.5e-5
CPU = Machine(
    name="cpu",
    workers=1,
    bf16_flops=_CPU_FLOPS,
    fp8_flops=_CPU_FLOPS,
    memory_bytes=16e9,
    memory_bytes_s=_CPU_MEMORY_BYTES_S,
    wire_bytes_s=_CPU_MEMORY_BYTES_S,
    efficiency=1.0,
    attention_efficiency=DEMO.pair_flops / 1.4e-7 / _CPU_FLOPS,
    expert_efficiency=1.0,
    launch_s=8.9e-3 - DEMO.parameters * DEMO.weight_bytes / _CPU_MEMORY_BYTES_S,
    chunk_decode_s=1.07e-3,
    element_decode_s=1.1e-5 / DEMO.cache_elements,
    byte_decode_s=1.3e-7,
    link_element_s=2.2e-6 / DEMO.cache_elements,
    steering=_STEERING,
)

MACHINES = {
    machine.name: machine
    for machine in (
        CPU,
        *(gpu if count == 1 else gpu.group(count) for gpu in (A100, H100, H200) for count in (1, 4, 8)),
    )
}


def machine_named(name: str) -> Machine:
    """Look up a machine.

    Args:
        name: One of ``MACHINES``.

    Returns:
        The machine.

    Raises:
        NotFoundError: There is no such machine; the message lists those there are.
    """
    if name not in MACHINES:
        msg = f"no machine is called {name!r} here; choose one of {', '.join(MACHINES)}, or make a Machine"
        raise NotFoundError(msg)
    return MACHINES[name]
