"""Compile gates: every kernel on every architecture, without a device. No spills, registers within the table's limits,
and the instructions that its speed stands on."""

from __future__ import annotations

import pytest

from executor_svc.kernels.build import build
from executor_svc.kernels.table import all_kernels, find_kernel
from tests.kernels.sass import disassembler, opcodes, resources

pytestmark = pytest.mark.nvrtc

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a")
# f16 differs from bf16 in two instructions' types only: the recorded run has it.
USUAL = [name for name in all_kernels() if "f16" not in name.replace("bf16", "")]
RARE = [name for name in all_kernels() if name not in USUAL]


def _sources(names: list[str]) -> list[str]:
    return sorted({find_kernel(name).source for name in names})


def _gate(source: str, names: list[str], arch: str) -> None:
    """Of the kernels ``names`` that are in ``source``, compiled at once."""
    kernels = [find_kernel(name) for name in names if find_kernel(name).source == source]
    image = build(source, [kernel.name for kernel in kernels], arch)
    for kernel in kernels:
        symbol = image.lowered[kernel.name]
        used = resources(image, symbol)
        assert used.spills == 0, kernel.name
        assert used.stack == 0, kernel.name
        assert used.registers <= kernel.max_registers, kernel.name
        assert used.registers * kernel.threads <= 65536, kernel.name
        if disassembler() is None:
            continue
        found = opcodes(image, symbol)
        assert not [code for code in found if code.startswith(("LDL", "STL"))], kernel.name
        for wanted in kernel.opcodes:
            assert any(code.startswith(wanted) for code in found), (kernel.name, wanted)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("source", _sources(USUAL))
def test_gate(source: str, arch: str) -> None:
    _gate(source, USUAL, arch)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("source", _sources(RARE))
def test_rare_gate(source: str, arch: str) -> None:
    _gate(source, RARE, arch)


@pytest.mark.skipif(disassembler() is None, reason="needs cuobjdump and nvdisasm (their wheels)")
def test_the_gate_sees_a_spill() -> None:
    """A decode kernel held to 64 registers spills, and the gate's figures show it."""
    name = "paged_decode<bf16, 128>"
    text = _source("paged_decode.cu").replace("__launch_bounds__(WARPS* WARP)", "__launch_bounds__(WARPS * WARP, 8)")
    image = build("paged_decode.cu", [name], "sm_90a", overrides={"paged_decode.cu": text})
    used = resources(image, image.lowered[name])
    assert used.spills > 0
    assert used.registers <= 64
    assert [code for code in opcodes(image, image.lowered[name]) if code.startswith(("LDL", "STL"))]


def _source(name: str) -> str:
    from executor_svc.kernels.build import SOURCE_DIR

    return (SOURCE_DIR / name).read_text()
