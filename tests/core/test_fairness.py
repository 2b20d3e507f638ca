"""The least served tenant is found without a look at all that wait."""

from __future__ import annotations

import random

import pytest

from scheduler_svc.core import fairness
from scheduler_svc.core.fairness import FairShares


@pytest.mark.parametrize("seed", range(20))
def test_the_floor_is_what_the_least_served_of_those_that_wait_was_served(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the definition, with tenants that come, go, are forgotten and come back."""
    monkeypatch.setattr(fairness, "_MAX_IDLE", 5)
    draw, shares = random.Random(seed), FairShares(120.0, 1000)
    waiting: set[str] = set()
    floor = 0.0
    for _ in range(3000):
        tenant = f"t{draw.randrange(draw.choice([3, 30, 300]))}"
        action = draw.randrange(3)
        if action == 0 and tenant not in waiting:
            shares.waits(tenant)
            waiting.add(tenant)
        elif action == 1 and tenant in waiting and draw.random() < 0.7:
            shares.waits_no_more(tenant)
            waiting.discard(tenant)
        else:
            shares.charge(tenant, draw.randrange(200))
        if waiting:
            floor = max(floor, min(shares.served(name) for name in waiting))
            assert shares.floor == floor
        else:
            floor = shares.floor
        assert len(shares._least) <= 2 * len(waiting) + 64 + 300


def test_many_tenants_that_wait_cost_an_admission_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 5,000 that wait, each is looked at once or so, and not all when one leaves."""
    shares = FairShares(120.0, 1000)
    for i in range(5000):
        shares.waits(f"t{i}")
        shares.charge(f"t{i}", i)
    looked: list[object] = []

    class Served(dict[str, float]):
        def __getitem__(self, tenant: str) -> float:
            looked.append(tenant)
            return super().__getitem__(tenant)

    monkeypatch.setattr(shares, "_served", Served(shares._served))
    for i in range(100):
        shares.waits_no_more(f"t{i}")
    assert shares.floor == 100.0
    assert len(looked) < 15000
