"""Lightning's Trainer trains a LightningModule with a compiled model on two ranks as it trains one
with the model itself in one process.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pools
from torch.utils.data import DataLoader, DistributedSampler
from trainer_cases import (
    BATCH,
    EPS,
    PLANS,
    compare,
    compiled,
    environment,
    model,
    samples,
    weights,
)

from autopar.errors import RunError


def _module(label: str | None) -> Any:
    """A LightningModule, made here: Lightning is imported on the ranks only."""
    from lightning.pytorch import LightningModule

    class Language(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net: Any = None
            self.history: list[float] = []

        def configure_model(self) -> None:
            if self.net is None:
                self.net = model() if label is None else compiled(label)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = self.net(**batch).loss
            self.history.append(loss.item())
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("valid", self.net(**batch).loss, sync_dist=True)

        def on_before_zero_grad(self, optimizer: Any) -> None:
            self.history.append(optimizer.param_groups[0]["lr"])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2, eps=EPS)
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    return Language()


def _trainer(label: str | None, folder: str, **options: Any) -> Any:
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    from autopar.integrations.lightning import TrainerStrategy

    given: dict[str, Any] = dict(strategy="auto", devices=1)
    if label is not None:
        given = dict(strategy=TrainerStrategy(), devices=2)
    saved = ModelCheckpoint(folder, "{epoch}", monitor="valid", save_top_k=-1, save_last=True)
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False)
    return Trainer(
        accelerator="cpu",
        max_epochs=3,
        accumulate_grad_batches=2,
        gradient_clip_val=0.3,
        num_sanity_val_steps=0,
        callbacks=[saved],
        **(quiet | given | options),
    )


def _loaders(label: str | None) -> list[DataLoader]:
    """Lightning shuffles the training set on several ranks, by the epoch."""
    size = BATCH // 2 if label == "local" else BATCH
    given = samples(32)
    shuffled = DistributedSampler(given, 1, 0, seed=0) if label is None else None
    trained = DataLoader(given, batch_size=size, sampler=shuffled)
    return [trained, DataLoader(samples(16), batch_size=size)]


def _trains(label: str | None, folder: str, resume: str | None = None) -> tuple[Any, ...]:
    with environment():
        warnings.filterwarnings("ignore", message=".*does not have many workers")
        warnings.filterwarnings("ignore", message=".*exists and is not empty")
        trainer, module = _trainer(label, folder), _module(label)
        trainer.fit(module, *_loaders(label), ckpt_path=resume)
        final = weights(module.net)
        valid = trainer.validate(module, _loaders(label)[1], ckpt_path="best", verbose=False)
        best = trainer.checkpoint_callback.best_model_score.item()
        return module.history, [valid[0]["valid"], best], final


@pytest.mark.sampled(fast=0, slow=1)
@pytest.mark.slow
@pytest.mark.parametrize("label", PLANS)
def test_fits_validates_saves_and_goes_on(ranks: Pools, tmp_path: Path, label: str) -> None:
    expected, valid, whole = ranks(1).run(_trains, None, str(tmp_path / "plain"))[0]
    assert len(expected) == 3 * (4 + 2)
    assert valid[0] == pytest.approx(valid[1], rel=1e-6)
    found = ranks(2).run(_trains, label, str(tmp_path / "first"))
    for history, evaluated, parts in found:
        assert history == pytest.approx(expected, rel=1e-4)
        assert evaluated == pytest.approx(valid, rel=1e-4)
        compare(parts, whole)
    names = {path.name for path in (tmp_path / "first").iterdir()}
    assert names == {"epoch=0.ckpt", "epoch=1.ckpt", "epoch=2.ckpt", "last.ckpt"}
    start, again = str(tmp_path / "first/epoch=0.ckpt"), str(tmp_path / "again")
    for (history, evaluated, parts), (before, known, final) in zip(
        ranks(2).run(_trains, label, again, start), found, strict=True
    ):
        assert history == before[-len(history) :]
        assert len(history) == 2 * (4 + 2)
        assert evaluated == known
        assert all(torch.equal(parts[name], final[name]) for name in final)


def _refuses(folder: str) -> None:
    with environment():
        warnings.filterwarnings("ignore", message=".*does not have many workers")
        module = _module("local")
        module.head = torch.nn.Linear(2, 2)
        with pytest.raises(RunError, match=r"parameters outside its compiled model.*head.weight"):
            _trainer("local", folder).fit(module, *_loaders("local"))
        plain = _module(None)
        with pytest.raises(RunError, match=r"Language has 0 compiled models: give it one"):
            _trainer("local", folder).fit(plain, *_loaders("local"))
        with pytest.raises(RunError, match=r"precision: MixedPrecision .* use compile\(precision="):
            _trainer("local", folder, precision="bf16-mixed")
        few = DataLoader(samples(12), batch_size=BATCH // 2)
        with pytest.raises(RunError, match=r"a batch of 4 samples out of 8"):
            _trainer("local", folder).fit(_module("local"), few)


@pytest.mark.slow
def test_what_would_count_otherwise_is_refused(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(_refuses, str(tmp_path))
