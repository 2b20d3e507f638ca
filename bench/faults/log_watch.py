"""What the processes said of a fault: when it was found, and what was found without one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

_FIELD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)')

# Event -> the field that names who is meant.
DEATHS = {
    "executor gone": "executor",
    "executor hangs": "executor",
    "executor quarantined": "executor",
    "child ended, starting it again": "child",
    "the core is frozen, killing it": "",
    "child is frozen, killing it": "child",
}


@dataclass(frozen=True, slots=True)
class Event:
    when: float  # Unix seconds
    event: str
    fields: dict[str, str]


def parse(text: str) -> list[Event]:
    events = []
    for line in text.splitlines():
        fields = {key: value.strip('"') for key, value in _FIELD.findall(line)}
        if "time" in fields and "event" in fields:
            when = datetime.fromisoformat(fields["time"].replace("Z", "+00:00")).timestamp()
            events.append(Event(when, fields["event"], fields))
    return events


def deaths(events: Iterable[Event]) -> list[tuple[float, str, str]]:
    """(when, who, event) of every peer or process that was given up."""
    return [
        (event.when, event.fields.get(DEATHS[event.event], "core"), event.event)
        for event in events
        if event.event in DEATHS
    ]
