"""Which device does a rank compute on? There is no GPU here: the tests stand in for torch.cuda, and
check the calls that are made against torch's own signatures.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import autopar
from autopar.runtime.communication import join, rank_device
from autopar.runtime.communication.rank_device import device_type_of, same_device, take_device

META, GPU_0, GPU_1 = torch.device("meta"), torch.device("cuda", 0), torch.device("cuda", 1)


class Machine:
    """A machine with ``count`` GPUs, of which a process sees all; records what is done to it."""

    def __init__(self, monkeypatch, count=4, current=None, **environment):
        self.current, self.calls = current, []
        for name in ("LOCAL_RANK", "RANK", "CUDA_VISIBLE_DEVICES"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: self.current is not None)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "set_device", self.set_device)

    def set_device(self, device):
        self.current = device.index
        self.calls.append(("set_device", device))

    def init_process_group(self, *args, **kwargs):
        signature = inspect.signature(dist.distributed_c10d.init_process_group)
        self.calls.append(("init", signature.bind(*args, **kwargs).arguments))


@pytest.mark.parametrize(
    ("environment", "current", "model", "expected"),
    [
        (dict(LOCAL_RANK="2"), None, META, 2),
        (dict(LOCAL_RANK="2"), 0, META, 2),  # the script has touched CUDA and chosen nothing
        (dict(LOCAL_RANK="2"), 3, META, 3),  # the script has chosen
        (dict(LOCAL_RANK="1"), None, GPU_1, 1),
        (dict(), None, GPU_1, 1),  # a notebook
        (dict(), 0, META, 0),
        (dict(RANK="6"), None, META, 2),  # a launcher that gives ranks alone
    ],
)
def test_gpu_of_a_rank(monkeypatch, environment, current, model, expected):
    machine = Machine(monkeypatch, current=current, **environment)
    assert take_device(model) == torch.device("cuda", expected)
    assert machine.calls == [("set_device", torch.device("cuda", expected))]


def test_one_visible_gpu(monkeypatch):
    Machine(monkeypatch, count=1, LOCAL_RANK="5", CUDA_VISIBLE_DEVICES="5")
    assert take_device(META) == GPU_0
    Machine(monkeypatch, count=1, LOCAL_RANK="5")
    with pytest.raises(autopar.AutoparError, match=r"LOCAL_RANK=5 has no GPU: this process sees 1"):
        take_device(META)


def test_model_on_another_gpu(monkeypatch):
    machine = Machine(monkeypatch, LOCAL_RANK="1")
    expected = r"model is on cuda:0, .* on cuda:1 \(LOCAL_RANK=1\): call torch.cuda.set_device\(1\)"
    with pytest.raises(autopar.AutoparError, match=expected):
        take_device(GPU_0)
    assert machine.calls == []


def test_model_on_the_cpu_leaves_gpus_alone(monkeypatch):
    machine = Machine(monkeypatch, LOCAL_RANK="1")
    assert take_device(torch.device("cpu")) == torch.device("cpu")
    assert machine.calls == []


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("cuda:nccl", "cuda"),
        ("cpu:gloo,cuda:nccl", "cuda"),
        ("cpu:gloo,cuda:gloo", "cpu"),  # what init_process_group("gloo") makes
        ("cpu:fake,cuda:fake", "cuda"),
    ],
)
def test_meta_model_follows_the_group_of_the_script(monkeypatch, config, expected):
    Machine(monkeypatch)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    assert device_type_of(META) == device_type_of(None) == expected


def test_group_that_sends_nothing_of_the_device(monkeypatch):
    Machine(monkeypatch)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    with pytest.raises(autopar.AutoparError, match=r"trains on cpu, .* nccl for cuda and sends no"):
        take_device(torch.device("cpu"))


def test_ranks_that_would_send_tensors_of_gpus_over_gloo(monkeypatch):
    Machine(monkeypatch)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:gloo")
    with pytest.raises(autopar.AutoparError, match=r"over gloo: .* segmentation fault .* 'nccl'"):
        take_device(GPU_0)


def test_bound_group_decides(monkeypatch):
    Machine(monkeypatch, LOCAL_RANK="1")
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    world = SimpleNamespace(WORLD=SimpleNamespace(bound_device_id=torch.device("cuda", 3)))
    monkeypatch.setattr(rank_device.dist, "group", world)
    assert take_device(META) == torch.device("cuda", 3)


@pytest.mark.parametrize("environment", [dict(), dict(RANK="1", LOCAL_RANK="1")])
def test_meta_model_on_gpus_gets_nccl_bound_to_its_gpu(monkeypatch, environment):
    machine = Machine(monkeypatch, **environment)
    monkeypatch.setattr(dist, "init_process_group", machine.init_process_group)
    monkeypatch.setattr(join, "watch_world", lambda: None)
    own = GPU_1 if environment else GPU_0
    assert join.join_group(2 if environment else 1, META, timeout=60) == own
    (first, device), (second, arguments) = machine.calls
    assert (first, device, second) == ("set_device", own, "init")
    assert (arguments["backend"], arguments["device_id"]) == ("nccl", own)


def test_batch_on_another_gpu():
    assert same_device(torch.device("cpu", 0), torch.device("cpu"))
    compiled = autopar.compile(torch.nn.Sequential(torch.nn.Linear(4, 1), Sum()), X, 1)
    signature = compiled._signature
    signature._device = GPU_0
    with FakeTensorMode():
        on_0, on_1 = torch.empty(2, 4, device=GPU_0), torch.empty(2, 4, device=GPU_1)
    assert signature.bind((on_0,), {}) == [on_0]
    expected = r"is on cuda:1, this rank's program runs on cuda:0: pass .*\.to\('cuda:0'\)"
    with pytest.raises(autopar.AutoparError, match=expected):
        signature.bind((on_1,), {})


X = torch.ones(2, 4)


class Sum(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum()
