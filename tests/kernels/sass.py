"""What ptxas made of a kernel: its resources from the compiler's report, its instructions from the disassembler."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from executor_svc.kernels.build import Image


@dataclass(frozen=True, slots=True)
class Resources:
    registers: int  # of a thread
    stack: int  # bytes
    spills: int  # bytes stored and loaded


def resources(image: Image, symbol: str) -> Resources:
    """From the log of a cubin with one or more kernels."""
    part = re.search(rf"entry function '{re.escape(symbol)}'(.*?)(?=entry function|\Z)", image.log, re.S)
    if part is None:
        raise ValueError(f"no report of {symbol}")
    text = part[1]
    registers = re.search(r"Used (\d+) registers", text)
    memory = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text)
    if registers is None or memory is None:
        raise ValueError(f"unexpected report: {text}")
    return Resources(int(registers[1]), int(memory[1]), int(memory[2]) + int(memory[3]))


def disassembler() -> tuple[str, str] | None:
    """Paths of cuobjdump and of the folder of nvdisasm, which it calls; None where one is missing."""
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    for root in sys.path:
        folders += os.pathsep + str(Path(root, "nvidia", "cu13", "bin"))
    dump, disassemble = shutil.which("cuobjdump", path=folders), shutil.which("nvdisasm", path=folders)
    return (dump, str(Path(disassemble).parent)) if dump and disassemble else None


def opcodes(image: Image, symbol: str) -> list[str]:
    """Every SASS instruction of a kernel, modifiers included, in order."""
    body = _dump(image.data).split(f"Function : {symbol}")[1].split("Function :")[0]
    return re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]+)", body)


@lru_cache(maxsize=1)
def _dump(cubin: bytes) -> str:
    """The disassembler takes half a second to start: one run for all kernels of a cubin."""
    tools = disassembler()
    if tools is None:
        raise FileNotFoundError("cuobjdump and nvdisasm")
    environment = {**os.environ, "PATH": os.pathsep.join([tools[1], os.environ.get("PATH", "")])}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tools[0], "--dump-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
