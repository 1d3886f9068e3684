"""accelerate's Accelerator trains a compiled model on two ranks as it trains the model itself in
one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pools
from torch.utils.data import DataLoader, SubsetRandomSampler
from trainer_cases import BATCH, EPS, PLANS, compare, compiled, environment, model, samples, weights

from autopar.errors import RunError


def _prepared(label: str | None, seed: int = 5, **options: Any) -> tuple[Any, ...]:
    """An Accelerator, and what it prepared: model, optimizer, loader and scheduler. The loader has
    the global batch, of which each replica takes its part.
    """
    import accelerate
    from accelerate.utils import DataLoaderConfiguration, set_seed

    from autopar.integrations.accelerate import Accelerator

    set_seed(seed)
    kind = accelerate.Accelerator if label is None else Accelerator
    config = DataLoaderConfiguration(True, use_seedable_sampler=True, data_seed=3)
    accelerator = kind(cpu=True, gradient_accumulation_steps=2, dataloader_config=config, **options)
    made: Any = model() if label is None else compiled(label)
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2, eps=EPS)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    loader = DataLoader(samples(32), batch_size=BATCH, shuffle=True)
    return accelerator, *accelerator.prepare(made, optimizer, loader, scheduler)


def _epoch(accelerator: Any, made: Any, optimizer: Any, loader: Any, scheduler: Any) -> list[Any]:
    """Of each batch the loss; of each step also the norm and the learning rate."""
    history = []
    for batch in loader:
        with accelerator.accumulate(made):
            loss = made(**batch).loss
            accelerator.backward(loss)
            history.append(loss.item())
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(made.parameters(), 0.3)
                history += [norm.item(), scheduler.get_last_lr()[0]]
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return history


def _evaluates(accelerator: Any, made: Any) -> tuple[torch.Tensor, ...]:
    """The logits and labels of two and a half batches, and the sum of what all replicas have."""
    loader = accelerator.prepare(DataLoader(samples(20), batch_size=BATCH))
    made.eval()
    found, texts, total = [], [], None
    with torch.no_grad():
        for batch in loader:
            output = made(**batch)
            found.append(accelerator.gather_for_metrics((output.logits, batch["labels"])))
            texts += accelerator.gather_for_metrics([str(row) for row in batch["labels"]])
            total = accelerator.reduce(batch["input_ids"].sum()) if total is None else total
    made.train()
    logits, labels = (torch.cat(parts) for parts in zip(*found, strict=True))
    assert texts == [str(row) for row in labels]
    return logits, labels, total


def _trains(label: str | None, folder: str) -> tuple[Any, ...]:
    with environment():
        accelerator, *prepared = _prepared(label)
        history = _epoch(accelerator, *prepared)
        accelerator.save_state(folder)
        evaluated = _evaluates(accelerator, prepared[0])
        history += _epoch(accelerator, *prepared)
        assert accelerator.unwrap_model(prepared[0]) is prepared[0]
        return history, evaluated, weights(prepared[0])


def _goes_on(label: str, folder: str) -> tuple[Any, ...]:
    with environment():
        accelerator, *prepared = _prepared(label, seed=6)
        for _ in prepared[2]:  # an epoch, whose order the next one's depends on
            pass
        accelerator.load_state(folder)
        return _epoch(accelerator, *prepared), weights(prepared[0])


@pytest.mark.sampled(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize("label", PLANS)
def test_trains_gathers_saves_and_goes_on(ranks: Pools, tmp_path: Path, label: str) -> None:
    expected, evaluated, whole = ranks(1).run(_trains, None, str(tmp_path / "plain"))[0]
    assert len(expected) == 2 * (4 + 2 * 2)
    assert [len(x) for x in evaluated[:2]] == [20, 20]
    folder = str(tmp_path / "state")
    found = ranks(2).run(_trains, label, folder)
    for history, gathered, parts in found:
        assert history == pytest.approx(expected, rel=1e-4)
        torch.testing.assert_close(gathered, evaluated, rtol=1e-3, atol=1e-3)
        assert torch.equal(gathered[1], evaluated[1])
        compare(parts, whole)
    for (history, parts), (before, _, final) in zip(
        ranks(2).run(_goes_on, label, folder), found, strict=True
    ):
        assert history == before[len(before) // 2 :]
        assert all(torch.equal(parts[name], final[name]) for name in final)


def _backwards(accelerator: Any, made: Any, loader: Any) -> None:
    for batch in loader:
        accelerator.backward(made(**batch).loss)


def _refuses() -> None:
    import accelerate

    from autopar.integrations.accelerate import Accelerator

    with environment():
        accelerator, made, *_ = _prepared("tensor")
        given = samples(12)
        loader = accelerator.prepare(DataLoader(given, batch_size=BATCH))
        with pytest.raises(RunError, match="the last batch of the loader has 4 samples, and repe"):
            _backwards(accelerator, made, loader)
        sampler = SubsetRandomSampler(range(9))
        with pytest.raises(RunError, match="draws 9 samples of a dataset of 12, in batches of 8"):
            accelerator.prepare(DataLoader(given, batch_size=BATCH, sampler=sampler))
        with pytest.raises(RunError, match=r"a Linear: this Accelerator takes one model"):
            accelerator.prepare(torch.nn.Linear(2, 2))
        with pytest.raises(RunError, match=r"prepare\(loader\) needs the compiled model"):
            Accelerator(cpu=True).prepare(DataLoader(given, batch_size=BATCH))
    with environment():
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        with pytest.raises(RunError, match=r"mixed_precision, .* use compile\(precision="):
            accelerator.prepare(compiled("tensor"))
    adapter = pytest.raises(RunError, match=r"take the adapter in autopar.integrations")
    with environment(), adapter:
        accelerate.Accelerator(cpu=True).prepare(compiled("tensor"))


@pytest.mark.slow
def test_what_would_count_otherwise_is_refused(ranks: Pools) -> None:
    ranks(2).run(_refuses)
