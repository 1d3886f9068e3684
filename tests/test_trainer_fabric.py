"""Lightning's Fabric trains a compiled model on two ranks as it trains the model itself in one
process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pools
from torch.utils.data import DataLoader
from trainer_cases import BATCH, EPS, PLANS, compare, compiled, environment, model, samples, weights

from autopar.errors import RunError


def _fabric(label: str | None, **options: Any) -> Any:
    from lightning.fabric import Fabric

    from autopar.integrations.lightning import FabricStrategy

    alone = dict(strategy="auto", devices=1)
    given = alone if label is None else dict(strategy=FabricStrategy(), devices=2)
    fabric = Fabric(accelerator="cpu", **given, **options)
    fabric.launch()
    return fabric


def _trains(label: str | None, folder: str, resume: str | None = None) -> tuple[Any, ...]:
    with environment():
        fabric = _fabric(label)
        made: Any = model() if label is None else compiled(label)
        size = BATCH // getattr(made, "data_size", 1)
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2, eps=EPS)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        made, optimizer = fabric.setup(made, optimizer)
        loader = fabric.setup_dataloaders(DataLoader(samples(32), batch_size=size))
        state = dict(model=made, optimizer=optimizer, scheduler=scheduler, epoch=0)
        if resume is not None:
            assert fabric.load(resume, state) == {}
        history, first = [], state["epoch"]
        for epoch in range(first, 2):
            for step, batch in enumerate(loader):
                with fabric.no_backward_sync(made, enabled=step % 2 == 0):
                    loss = made(**batch).loss
                    fabric.backward(loss / 2)
                history.append(loss.item())
                if step % 2 == 1:
                    norm = fabric.clip_gradients(made, optimizer, max_norm=0.3)
                    history += [norm.item(), scheduler.get_last_lr()[0]]
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
            fabric.save(f"{folder}/epoch-{epoch}", state | {"epoch": epoch + 1})
        made.eval()
        with torch.no_grad():
            output = made(**batch)
        labels = fabric.all_gather(batch["labels"]).flatten(0, -2)
        total = fabric.all_reduce(batch["labels"].sum(), reduce_op="sum")
        assert total == labels.sum()
        history.append(output.loss.item())
        return history, labels, weights(made.module)


@pytest.mark.sampled(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize("label", PLANS)
def test_trains_saves_and_goes_on(ranks: Pools, tmp_path: Path, label: str) -> None:
    expected, labels, whole = ranks(1).run(_trains, None, str(tmp_path / "plain"))[0]
    found = ranks(2).run(_trains, label, str(tmp_path / "first"))
    for history, gathered, parts in found:
        assert history == pytest.approx(expected, rel=1e-4)
        assert sorted(map(tuple, gathered.tolist())) == sorted(map(tuple, labels.tolist()))
        compare(parts, whole)
    start, again = str(tmp_path / "first/epoch-0"), str(tmp_path / "again")
    for (history, _, parts), (before, _, final) in zip(
        ranks(2).run(_trains, label, again, start), found, strict=True
    ):
        assert history == before[-len(history) :]
        assert all(torch.equal(parts[name], final[name]) for name in final)


def _refuses(folder: str) -> None:
    with environment():
        fabric = _fabric("local")
        with pytest.raises(RunError, match=r"the strategy needs the compiled model"):
            fabric.setup_dataloaders(DataLoader(samples(8)))
        with pytest.raises(RunError, match=r"fabric.setup was given a Linear"):
            fabric.setup(torch.nn.Linear(2, 2))
        made = fabric.setup(compiled("local"))
        with pytest.raises(RunError, match=r"a batch of 4 samples out of 8"):
            fabric.setup_dataloaders(DataLoader(samples(12), batch_size=4))
        with pytest.raises(RunError, match=r"the state has 0 models \(none\): give one"):
            fabric.save(folder, {"epoch": 1})
        fabric.save(folder, {"model": made, "epoch": 1})
        with pytest.raises(RunError, match=r"was saved without step"):
            fabric.load(folder, {"model": made, "step": 1})
        fabric = _fabric("local", precision="bf16-mixed")
        with pytest.raises(RunError, match=r"precision: MixedPrecision .* use compile\(precision="):
            fabric.setup(compiled("local"))


@pytest.mark.slow
def test_what_would_count_otherwise_is_refused(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(_refuses, str(tmp_path / "state"))
