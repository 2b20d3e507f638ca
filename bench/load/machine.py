"""What else used the machine during a measurement, from /proc: a disturbed run is marked, not trusted."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


class MachineWatch:
    """CPU of the whole machine minus that of given process trees, as a share of all cores.

    >>> with MachineWatch([server.pid]) as watch: ...
    >>> watch.others, watch.steal
    """

    def __init__(self, roots: list[int]) -> None:
        self._roots = {*roots, os.getpid()}
        self.others = self.steal = 0.0

    def __enter__(self) -> MachineWatch:
        self._before = _machine_ticks(), _tree_ticks(self._roots)
        return self

    def __exit__(self, *error: object) -> None:
        ticks = [after - before for after, before in zip(_machine_ticks(), self._before[0], strict=True)]
        ours = _tree_ticks(self._roots) - self._before[1]
        total = max(1, sum(ticks))
        used = total - ticks[3] - ticks[4]  # all but idle and iowait
        self.others, self.steal = max(0.0, (used - ours) / total), ticks[7] / total


def _machine_ticks() -> list[int]:
    """user, nice, system, idle, iowait, irq, softirq, steal"""
    with open("/proc/stat") as stat:
        return [int(value) for value in stat.readline().split()[1:9]]


def _tree_ticks(roots: set[int]) -> int:
    """CPU ticks of the processes ``roots`` and everything below them, ended children included."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                values = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                parents[int(entry.name)] = int(values[1])
                ticks[int(entry.name)] = sum(int(value) for value in values[11:15])
    return sum(used for pid, used in ticks.items() if _below(pid, parents, roots))


def _below(pid: int, parents: dict[int, int], roots: set[int]) -> bool:
    while pid and pid not in roots:
        pid = parents.get(pid, 0)
    return pid in roots
