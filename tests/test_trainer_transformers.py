"""transformers' Trainer trains a compiled model on two ranks as it trains the model itself in one
process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pool import Pools
from trainer_cases import BATCH, EPS, PLANS, compare, compiled, environment, model, samples, weights

from autopar.errors import RunError

COUNT = dict(num_items_in_batch=torch.tensor(1.0))
NUMBERS = "loss", "grad_norm", "learning_rate", "eval_loss", "eval_sum", "eval_count", "epoch"


def _arguments(folder: str, replicas: int, **more: Any) -> transformers.TrainingArguments:
    options: dict[str, Any] = dict(
        per_device_train_batch_size=BATCH // replicas,
        per_device_eval_batch_size=BATCH // replicas,
        gradient_accumulation_steps=2,
        max_grad_norm=0.3,
        learning_rate=1e-2,
        adam_epsilon=EPS,
        warmup_steps=1,
        logging_steps=1,
        num_train_epochs=2,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        seed=3,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    return transformers.TrainingArguments(folder, **options | more)


def _metrics(predicted: Any) -> dict[str, float]:
    """What depends on each logit, and on which sample it belongs to."""
    counted = predicted.label_ids != -100
    return {
        "sum": float(
            abs(predicted.predictions[counted] * predicted.label_ids[counted, None]).sum()
        ),
        "count": len(predicted.label_ids),
    }


def _trainer(label: str | None, folder: str, dropout: float = 0.0, **more: Any) -> Any:
    """The Trainer of a plan, or of the model itself."""
    if label is None:
        kind, made, replicas = transformers.Trainer, model(), 1
    else:
        from autopar.integrations.transformers import Trainer

        kind, made = Trainer, compiled(label, dropout, **COUNT)
        replicas = made.data_size
    given = samples(40)
    return kind(
        model=made,
        args=_arguments(folder, replicas, **more),
        train_dataset=given[:40],
        eval_dataset=given[:20],  # two and a half batches
        compute_metrics=_metrics,
    )


def _trains(label: str | None, folder: str, resume: str | None = None) -> tuple[Any, Any]:
    with environment():
        trainer = _trainer(label, folder)
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model()
        history = [
            {name: entry[name] for name in NUMBERS if name in entry}
            for entry in trainer.state.log_history
        ]
        return history, weights(trainer.model)


@pytest.mark.sampled(fast=0, slow=1)
@pytest.mark.parametrize("label", [pytest.param(name, marks=pytest.mark.slow) for name in PLANS])
def test_trains_evaluates_saves_and_goes_on(ranks: Pools, tmp_path: Path, label: str) -> None:
    (expected, whole), *_ = ranks(1).run(_trains, None, str(tmp_path / "plain"))
    assert sum("loss" in entry for entry in expected) == 6
    folder = tmp_path / label
    found = ranks(2).run(_trains, label, str(folder))
    for history, parts in found:
        assert len(history) == len(expected)
        for entry, known in zip(history, expected, strict=True):
            assert entry == pytest.approx(known, rel=1e-4)
        compare(parts, whole)
    read = transformers.GPT2LMHeadModel.from_pretrained(folder)
    compare(weights(read), whole)
    assert transformers.GPT2LMHeadModel.from_pretrained(folder / "checkpoint-4") is not None
    resumed = ranks(2).run(_trains, label, str(tmp_path / "resumed"), str(folder / "checkpoint-4"))
    for (history, parts), (before, final) in zip(resumed, found, strict=True):
        assert history == before
        assert all(torch.equal(parts[name], final[name]) for name in final)


def _with_dropout(folder: str, resume: str | None) -> tuple[list[Any], str]:
    """The losses, and that the best model is loaded at the end; the folder of the best."""
    best = dict(load_best_model_at_end=True, metric_for_best_model="loss")
    with environment():
        trainer = _trainer("local", folder, 0.2, **best)
        trainer.train(resume_from_checkpoint=resume)
        trainer.save_model(f"{folder}/final")
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return losses, trainer.state.best_model_checkpoint


@pytest.mark.slow
def test_goes_on_with_the_same_dropout_and_ends_with_the_best_model(
    ranks: Pools, tmp_path: Path
) -> None:
    losses, best = ranks(2).run(_with_dropout, str(tmp_path / "whole"), None)[0]
    found, expected = (
        weights(transformers.GPT2LMHeadModel.from_pretrained(path))
        for path in (tmp_path / "whole/final", best)
    )
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    start = str(tmp_path / "whole/checkpoint-2")
    resumed, _ = ranks(2).run(_with_dropout, str(tmp_path / "resumed"), start)[0]
    assert resumed == losses


REFUSED: list[tuple[dict[str, Any], str]] = [
    (dict(bf16=True), r"bf16=True .* use compile\(precision="),
    (dict(torch_compile=True), r"torch_compile=True .* use compile\(backend="),
    (dict(label_smoothing_factor=0.1), r"label_smoothing_factor=0.1 .* use compile\(loss_fn="),
    (dict(average_tokens_across_devices=False), "the loss is that of all replicas"),
    (
        dict(save_only_model=True, load_best_model_at_end=True, metric_for_best_model="loss"),
        "which save_only_model omits",
    ),
]


def _refuses(folder: str) -> None:
    from autopar.integrations.transformers import Trainer

    with environment():
        for more, message in REFUSED:
            with pytest.raises(RunError, match=message):
                _trainer("local", folder, **more)
        with pytest.raises(RunError, match=r"compile with num_items_in_batch=torch.tensor\(1.0\)"):
            Trainer(model=compiled("local"), args=_arguments(folder, 2))
        with pytest.raises(RunError, match=r"model=GPT2LMHeadModel\): give model=, what autopar"):
            Trainer(model=model(), args=_arguments(folder, 2))
        made = compiled("local", **COUNT)
        args = _arguments(folder, 2, eval_strategy="no")
        given = dict(args=args, train_dataset=samples(12))
        with pytest.raises(RunError, match="a batch of 4 samples out of 8"):
            Trainer(made, **given).train()
        Path(folder, "saved").mkdir(exist_ok=True)
        with pytest.raises(RunError, match="saved with save_only_model, or by another Trainer"):
            Trainer(made, **given).train(f"{folder}/saved")


@pytest.mark.slow
def test_what_would_change_the_program_is_refused(ranks: Pools, tmp_path: Path) -> None:
    ranks(2).run(_refuses, str(tmp_path))
