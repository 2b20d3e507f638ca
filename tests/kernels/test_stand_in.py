"""The stand-in keeps to what a device allows, and its guard sees what would make the host wait."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from executor_svc.backends.cuda.device import Device
from executor_svc.backends.cuda.staging import BUFFERS, Readback, Staging
from tests.kernels.backends import make_device
from tests.kernels.ptx.launcher import PtxLauncher
from tests.kernels.stand_in import PATIENCE, HostRead, NoHostReads, StandIn
from tests.kernels.tiny_models import LLAMA, cuda_model

READS: list[Callable[[torch.Tensor], Any]] = [
    lambda x: x[0].item(),
    lambda x: x.tolist(),
    lambda x: x.numpy(),
    lambda x: float(x[0]),
    lambda x: bool(x[0] > 0),
    lambda x: x.cpu(),
    lambda x: x.to("cpu"),
    lambda x: x.to(torch.device("cpu")),
    lambda x: x[x > 0],
    lambda x: x.nonzero(),
    lambda x: x.masked_select(x > 0),
    lambda x: torch.equal(x, x),
    lambda x: torch.unique(x),
    lambda x: torch.from_numpy(np.zeros(1)),
    lambda x: torch.tensor([1.0]),
    lambda x: x.repeat_interleave(x.long()),
]


@pytest.mark.parametrize("read", READS)
def test_reads_are_refused(read: Callable[[torch.Tensor], Any]) -> None:
    with NoHostReads(), pytest.raises(HostRead):
        read(torch.zeros(3))


def test_work_on_the_device_is_not() -> None:
    x = torch.ones(4, 4)
    with NoHostReads():
        y = (x @ x).to(torch.bfloat16).float()
        z = y[torch.arange(2)] + torch.zeros(4)
        z.copy_(y[:2], non_blocking=True)
    assert z.tolist() == [[4.0] * 4] * 2


@pytest.fixture
def device() -> Device:
    return make_device()


def test_a_graph_replays_addresses_and_values(device: Device) -> None:
    """What the host put in stays; what lies at the addresses is read anew."""
    where = device.launcher.device
    x, out, factor = torch.ones(3, device=where), torch.zeros(3, device=where), 2.0

    def run() -> None:
        out.copy_((x * factor).view(3)[torch.arange(2, -1, -1, device=where)])

    run()
    replay = device.capture(run)
    x.copy_(torch.tensor([1.0, 2.0, 3.0]))
    factor = 100.0
    replay()
    assert out.tolist() == [6.0, 4.0, 2.0]


def test_staging_lays_arrays_end_to_end_at_fixed_addresses(device: Device) -> None:
    staging = Staging(device, 1024)
    first = staging.upload([np.arange(3), np.ones((2, 2), np.float32), np.zeros((0, 8), np.int32)])
    assert [t.tolist() for t in first] == [[0, 1, 2], [[1.0, 1.0], [1.0, 1.0]], []]
    second = staging.upload([np.array([7, 8, 9]), np.full((2, 2), 5, np.float32), np.ones((1, 8), np.int32)])
    assert [t.data_ptr() for t in first[:2]] == [t.data_ptr() for t in second[:2]]
    assert first[0].tolist() == [7, 8, 9], "one buffer on the device: the later step is there now"
    grown = staging.upload([np.arange(1000)])
    assert staging.size >= 8000
    assert grown[0][-1].item() == 999


def test_an_open_end_reaches_to_the_buffers_end(device: Device) -> None:
    staging = Staging(device, 160)
    *_, tables = staging.upload([np.arange(2), np.full((1, 1), -1, np.int32)], open_end=True)
    assert tables.shape == (36, 1)  # 160 bytes less one array of 16
    longer = staging.upload([np.arange(2), np.arange(5, dtype=np.int32)[:, None]], open_end=True)[1]
    assert longer.data_ptr() == tables.data_ptr()
    assert tables[:5, 0].tolist() == [0, 1, 2, 3, 4]


def test_landings_hold_what_was_there_when_they_were_asked_for(device: Device) -> None:
    readback, x = Readback(device, 64), torch.zeros(4, device=device.launcher.device)
    landings = []
    for value in range(BUFFERS - 1):
        x.fill_(value)
        landings.append(readback.copy([x, x[:1].to(torch.int64)]))
    x.fill_(-1)
    for value, landing in enumerate(landings):
        floats, ints = landing.wait()
        assert floats.tolist() == [value] * 4
        assert ints.tolist() == [value]


def test_a_landing_is_ready_when_the_device_is_done() -> None:
    """Asking does not wait."""
    device = StandIn(PtxLauncher(check_races=False))
    readback = Readback(device, 64)
    device.calls.append("something")
    landing = readback.copy([torch.ones(2)])
    assert not landing.ready()
    assert device.calls == ["something"]
    landing.wait()
    assert landing.ready()
    assert device.calls == ["something", "wait"]
    device.calls.append("more")
    later = readback.copy([torch.ones(2)])
    assert [later.ready() for _ in range(PATIENCE + 1)] == [False] * PATIENCE + [True]


@pytest.mark.nvrtc
def test_every_set_of_graphs_has_a_pool_of_its_own() -> None:
    """Within a set the graphs share it. Torch refuses the pool of graphs that are gone, as after another cache."""
    device = StandIn(PtxLauncher(check_races=False))
    model = cuda_model(dataclasses.replace(LLAMA, num_layers=1), device, "bfloat16")
    last_tokens = torch.zeros(2, dtype=torch.int64)
    for _ in range(2):
        model.allocate_kv_cache(4, 16)
        assert model.capture_graphs(last_tokens, 2) == 2
    first, second = device.pools[:2], device.pools[2:]
    assert first[0] is first[1]
    assert second[0] is second[1]
    assert first[0] is not None
    assert first[0] is not second[0]
