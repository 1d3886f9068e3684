"""PEFT's LoRA on a frozen base trains on two ranks as in one process, and PEFT reads its adapter.
Averages of weights are those of one process.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence import full
from pool import Pools
from trained import build
from trainer_cases import BATCH, EPS, PLANS, TOLERANCE, environment, model, samples

from autopar.errors import RunError


def _adapted() -> Any:
    import peft

    made = model()
    config = peft.LoraConfig(r=4, target_modules=["c_attn", "c_fc"], task_type="CAUSAL_LM")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return peft.get_peft_model(made, config)


def _batches() -> list[dict[str, torch.Tensor]]:
    given = samples(3 * BATCH)
    return [
        {name: torch.stack([one[name] for one in given[i : i + BATCH]]) for name in given[0]}
        for i in range(0, 3 * BATCH, BATCH)
    ]


def _trained(net: Any) -> list[torch.Tensor]:
    return [p for p in net.parameters() if p.requires_grad]


def _step(net: Any, optimizer: Any, batch: dict[str, torch.Tensor]) -> float:
    loss = net(**batch, use_cache=False).loss
    loss.backward()
    optimizer.step()
    return loss.item()


def _adapts(label: str, folder: str) -> None:
    import peft

    from autopar.integrations.peft import load_adapter, save_adapter

    with environment():
        plain = _adapted()
        sample = _batches()[0] | {"use_cache": False}
        net = build(copy.deepcopy(plain), sample, verify=False, **PLANS[label])
        size, rank = net.data_size, net.data_rank
        optimizers = [torch.optim.AdamW(_trained(n), lr=1e-2, eps=EPS) for n in (plain, net)]
        averages = {name: full(p).detach().clone() for name, p in net.named_parameters()}
        for batch in _batches():
            expected = _step(plain, optimizers[0], batch)
            own = {name: x.chunk(size)[rank] for name, x in batch.items()}
            assert _step(net, optimizers[1], own) == pytest.approx(expected, rel=1e-4)
            graded = {name for name, p in net.named_parameters() if p.grad is not None}
            assert graded == {n for n, p in net.named_parameters() if "lora_" in n}
            assert len(optimizers[1].state) == len(graded)
            for optimizer in optimizers:
                optimizer.zero_grad()
        save_adapter(net, plain, folder)
        read = peft.PeftModel.from_pretrained(model(), folder).state_dict()
        known = plain.state_dict()
        assert read.keys() == known.keys()
        for name, tensor in known.items():
            torch.testing.assert_close(read[name], tensor, **TOLERANCE)
        again = build(_adapted(), sample, verify=False, **PLANS[label])
        load_adapter(again, plain, folder)
        for (name, p), q in zip(net.named_parameters(), again.parameters(), strict=True):
            assert torch.equal(full(p), full(q)), name
            assert torch.equal(full(p), averages[name]) == ("lora_" not in name)
        with pytest.raises(RunError, match="nothing has no adapter that can be read"):
            load_adapter(again, plain, f"{folder}/nothing")


@pytest.mark.sampled(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize("label", PLANS)
def test_lora_trains_and_is_read_by_peft(ranks: Pools, tmp_path: Path, label: str) -> None:
    ranks(2).run(_adapts, label, str(tmp_path / "adapter"))


def _averages(label: str) -> None:
    """An exponential moving average as people write it, in a loop over parameters."""
    plain = model()
    sample = _batches()[0]
    net = build(copy.deepcopy(plain), sample, verify=False, **PLANS[label])
    names = [name for name, _ in net.named_parameters()]
    optimizers = [torch.optim.AdamW(n.parameters(), lr=1e-2, eps=EPS) for n in (plain, net)]
    kept = [{name: p.detach().clone() for name, p in n.named_parameters()} for n in (plain, net)]
    for batch in _batches():
        own = {name: x.chunk(net.data_size)[net.data_rank] for name, x in batch.items()}
        for one, optimizer, average, given in zip(
            (plain, net), optimizers, kept, (batch, own), strict=True
        ):
            one(**given).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for name, p in one.named_parameters():
                    average[name].mul_(0.5).add_(p, alpha=0.5)
    for name in names:
        torch.testing.assert_close(full(kept[1][name]), kept[0][name], **TOLERANCE)
    trained = copy.deepcopy(net.state_dict())
    net.load_state_dict(kept[1], strict=False)  # to evaluate it
    plain.load_state_dict(kept[0], strict=False)
    with torch.no_grad():
        expected, found = (n(**g).loss.item() for n, g in ((plain, batch), (net, own)))
    assert found == pytest.approx(expected, rel=1e-4)
    net.load_state_dict(trained)


@pytest.mark.sampled(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize("label", PLANS)
def test_a_loop_over_parameters_averages_them(ranks: Pools, label: str) -> None:
    ranks(2).run(_averages, label)
