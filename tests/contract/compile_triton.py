"""Compile every Triton kernel to machine code, for cards that are not here: the interpreter says
nothing about types, memory and layouts. Run by test_triton in a process of its own.

A launch is recorded instead of carried out, and its arguments give the types, so what is compiled
is what the backend would launch.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.contract.attention_cases import MIXED, Case, Sequence, Shape, build_step, make_spec
from workers.attention import triton_backend
from workers.attention.triton_backend import TritonAttention
from workers.attention.triton_writer import load_kernels
from workers.checkpoint.rope import RopeScaling
from workers.layers.rotary import Rotary

SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}
"""Bytes that one program may use, by compute capability."""

_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
}
_OPTIONS = ("num_warps", "num_stages")


@dataclass
class Recorder:
    """In place of a kernel: takes the launch and keeps what it was called with."""

    kernel: triton.JITFunction
    launches: list[dict] = field(default_factory=list)

    def __getitem__(self, grid: tuple[int, ...]):
        def launch(*positional, **named) -> None:
            names = [p.name for p in self.kernel.params]
            self.launches.append({**dict(zip(names, positional, strict=False)), **named})

        return launch


def compiled_size(kernel: triton.JITFunction, launch: dict, capability: int) -> int:
    """Bytes of shared memory."""
    constants = {p.name for p in kernel.params if p.is_constexpr}
    signature = {
        p.name: "constexpr" if p.name in constants else type_of(launch[p.name])
        for p in kernel.params
    }
    at = {kernel.arg_names.index(name): launch[name] for name in constants}
    # What Triton finds out at a launch: wide loads and their pipelining depend on it.
    aligned = [
        index
        for index, p in enumerate(kernel.params)
        if p.name not in constants and not p.do_not_specialize and is_aligned(launch[p.name])
    ]
    attributes = {(index,): [["tt.divisibility", 16]] for index in aligned}
    values = {(index,): value for index, value in at.items()}
    source = ASTSource(kernel, signature, values, attributes)
    options = {name: launch[name] for name in _OPTIONS if name in launch}
    target = GPUTarget("cuda", capability, 32)
    return int(triton.compile(source, target=target, options=options).metadata.shared)


def is_aligned(argument: object) -> bool:
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr() % 16 == 0
    return isinstance(argument, int) and argument % 16 == 0


def type_of(argument: object) -> str:
    if isinstance(argument, torch.Tensor):
        return _TYPES[argument.dtype]
    return "fp32" if isinstance(argument, float) else "i32"


def recorders() -> list[Recorder]:
    """One for every kernel of the product, put in its place."""
    found = []
    for module in (load_kernels(name) for name in ("mixed", "split", "write")):
        for name in vars(module):
            if name.endswith("_kernel"):
                recorder = Recorder(getattr(module, name))
                setattr(module, name, recorder)
                found.append(recorder)
    return found


def drive(case: Case, shape: Shape) -> None:
    """Every kind of step through the backend."""
    backend = TritonAttention(make_spec(case, shape))
    for sequences in (MIXED, [Sequence(1, 0)], [Sequence(1, 4000)]):
        step = build_step(case, shape, sequences)
        backend.plan(step.meta)
        backend.write_kv(step.key, step.value, step.cache)
        rotary = Rotary(RopeScaling(theta=1e4), shape.head_dim, torch.device("cpu"))
        angles = rotary.angles(step.meta.positions, backend.angle_dtype())
        rows = shape.heads + 2 * shape.kv_heads
        heads = step.query.new_zeros(step.meta.num_tokens, rows, shape.head_dim)
        backend.rotate_and_write(heads, angles, step.cache)
        backend.run(step.query, step.cache, step.query.clone(), shape.window)


WORKLOADS = [
    (torch.bfloat16, Shape(heads=32, kv_heads=8, head_dim=128), (80, 90)),
    (torch.bfloat16, Shape(9, 3, 64, block_size=24, window=512, softcap=30.0), (90,)),
    # The most shared memory, on the card that has less of it.
    (torch.float32, Shape(heads=2, kv_heads=2, head_dim=256), (80,)),
]


def main() -> None:
    kernels = recorders()
    triton_backend._INTERPRETED_PROCESSORS = 132
    for dtype, shape, capabilities in WORKLOADS:
        drive(Case("triton", "cpu", dtype, 0.0), shape)
        for recorder, capability in itertools.product(kernels, capabilities):
            for launch in distinct(recorder.launches):
                size = compiled_size(recorder.kernel, launch, capability)
                name = recorder.kernel.__name__
                print(f"{name} {dtype} {shape} sm_{capability}: {size} bytes", flush=True)
                assert size <= SHARED_MEMORY[capability], (name, shape, size)
        for recorder in kernels:
            assert recorder.launches, f"{recorder.kernel.__name__} is never launched"
            recorder.launches.clear()


def distinct(launches: list[dict]) -> list[dict]:
    """One launch per set of constants: the others would be compiled to the same."""
    found = {str([(k, v) for k, v in one.items() if k.isupper()]): one for one in launches}
    return list(found.values())


if __name__ == "__main__":
    main()
