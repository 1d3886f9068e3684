"""Train a vision transformer on scikit-learn's digits under several plans, and draw the trainings
on top of one device's.

``python examples/finetune_vit.py`` trains on one device, then starts local ranks for each plan of
``finetune_vit.json``: data, tensor, pipeline and hybrid parallelism, and the other modes of tensor
parallelism. All runs start from the same weights, random ones or those in the folder "start_from",
take the same batches and end with the same accuracy. ``torchrun --nproc-per-node 4
examples/finetune_vit.py --plans 2d`` runs one plan by hand and leaves ``2d.json`` in the folder
that ``--out`` names.

Width and heads are those of ViT-Tiny, which 12 layers make it but for its images' size.
``finetune_vit.svg`` is the picture of the plans tensor, 2d, 2.5d and 3d with 12 layers.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from local_launch import launch, on_this_rank
from torch.distributed.tensor import DTensor
from tqdm import tqdm
from vit_configuration import Configuration
from vit_results import ALONE, Run, picture, summary

import autopar

CLASSES, TEST_IMAGES = 10, 360


@dataclasses.dataclass(frozen=True)
class Digits:
    """Images [n, 1, 8, 8] between -1 and 1, and the digits on them."""

    train: torch.Tensor
    train_labels: torch.Tensor
    test: torch.Tensor
    test_labels: torch.Tensor


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    own = Path(__file__).with_suffix(".json")
    parser.add_argument("--config", type=Path, default=own, help="the configuration file")
    parser.add_argument(
        "--plans", nargs="+", help="those of the file's plans to run; all if left out"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("build/finetune_vit"),
        help="folder for the picture, curves.svg, and each run's numbers",
    )
    options = parser.parse_args()
    try:
        options.config = Configuration.read(options.config)
    except ValueError as e:
        parser.error(str(e))
    options.plans = options.plans or list(options.config.plans)
    if unknown := [name for name in options.plans if name not in options.config.plans]:
        parser.error(f"--plans {' '.join(unknown)}: the file has {', '.join(options.config.plans)}")
    if "RANK" in os.environ and len(options.plans) != 1:
        parser.error("under torchrun one plan runs: give --plans one")
    return options


def digits() -> Digits:
    """The 1797 images, split the same way in every run."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1  # of 0 to 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return Digits(images[train], labels[train], images[test], labels[test])


def network(configuration: Configuration) -> torch.nn.Module:
    """transformers' class, unmodified, without dropout so that runs can be compared; the same
    weights on every rank and in every run.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    no_dropout = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    if configuration.start_from is not None:
        return transformers.ViTForImageClassification.from_pretrained(
            configuration.start_from,
            num_labels=CLASSES,
            ignore_mismatched_sizes=True,
            **no_dropout,
        ).train()
    tiny = dict(hidden_size=192, num_attention_heads=3, intermediate_size=768)
    images = dict(image_size=8, patch_size=2, num_channels=1, num_labels=CLASSES)
    config = transformers.ViTConfig(
        **tiny, **images, **no_dropout, num_hidden_layers=configuration.layers
    )
    return transformers.ViTForImageClassification(config)


def sample(data: Digits, batch: int) -> dict[str, torch.Tensor]:
    return dict(pixel_values=data.train[:batch], labels=data.train_labels[:batch])


def train(
    model: torch.nn.Module, data: Digits, options: Configuration, label: str, ranks: int = 1
) -> Run:
    """Train for some epochs, and test after each."""
    from transformers import get_cosine_schedule_with_warmup

    per_epoch = len(data.train) // options.batch
    steps = per_epoch * options.epochs
    # fused: in the first step torch works out DTensors' layouts, which in mode 3d on two busy cores
    # made it take 22 s with foreach, so 6 s.
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, fused=True)
    schedule = get_cosine_schedule_with_warmup(
        optimizer, num_warmup_steps=steps // 10, num_training_steps=steps
    )
    shuffle = torch.Generator().manual_seed(1)
    losses, seconds, accuracies = [], [], []
    with tqdm(
        total=steps,
        desc=label,
        disable=ranks > 1 and dist.get_rank() != 0,
        unit="step",
        mininterval=0.2 if sys.stderr.isatty() else 10,
    ) as bar:
        for _ in range(options.epochs):
            order = torch.randperm(len(data.train), generator=shuffle)[: per_epoch * options.batch]
            for chosen in order.split(options.batch):
                start = time.perf_counter()
                loss = model(pixel_values=data.train[chosen], labels=data.train_labels[chosen]).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                seconds.append(time.perf_counter() - start)
                schedule.step()
                bar.update()
            accuracies.append(accuracy(model, data, options.batch))
            bar.set_postfix(loss=f"{losses[-1]:.3f}", accuracy=f"{accuracies[-1]:.3f}")
    return Run(ranks, losses, accuracies, statistics.median(seconds))


@torch.no_grad()
def accuracy(model: torch.nn.Module, data: Digits, batch: int) -> float:
    """The part of the test images that a model gets right, in batches of the one size: the last is
    filled up with images from the start.
    """
    model.eval()
    images = len(data.test)
    found = []
    for chosen in (torch.arange(-(-images // batch) * batch) % images).split(batch):
        logits = model(pixel_values=data.test[chosen], labels=data.test_labels[chosen]).logits
        found.append((logits.full_tensor() if isinstance(logits, DTensor) else logits).argmax(1))
    model.train()
    return float((torch.cat(found)[:images] == data.test_labels).double().mean())


def distributed(plan: str, configuration: Configuration) -> Run:
    """The same training under one plan; to be called on each of its ranks."""
    data, ranks = digits(), configuration.ranks(plan)
    given: dict[str, Any] = dict(cluster="cpu", optimizer="fused-adamw", progress=False)
    compiled = autopar.compile(
        network(configuration),
        sample(data, configuration.batch),
        ranks,
        **given,
        **configuration.options(plan),
    )
    return train(compiled, data, configuration, f"{plan} on {ranks} ranks", ranks)


def everything(options: argparse.Namespace) -> None:
    """All runs, the table and the picture."""
    configuration: Configuration = options.config
    runs = {ALONE: train(network(configuration), digits(), configuration, ALONE)}
    runs[ALONE].save(options.out / "alone.json")
    for plan in options.plans:
        launch(configuration.ranks(plan), f"plan {plan}: ", "--plans", plan)
        runs[plan] = Run.load(options.out / f"{plan}.json")
    drawing = options.out / "curves.svg"
    drawing.write_text(picture(runs, configuration.epochs), encoding="utf-8")
    print(
        f"\n{summary(runs)}\n\n(differences start as float32 rounding, since sums run in another "
        "order, and training amplifies them)"
    )
    print(f"drawn in {drawing}")


def main() -> None:
    options = arguments()
    if "RANK" not in os.environ:
        everything(options)
        return
    with on_this_rank():
        run = distributed(options.plans[0], options.config)
        if os.environ["RANK"] == "0":
            run.save(options.out / f"{options.plans[0]}.json")
        dist.barrier()


if __name__ == "__main__":
    main()
