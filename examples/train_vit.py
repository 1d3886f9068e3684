"""Train a vision transformer on scikit-learn's digits in every mode of tensor parallelism, and draw
it on top of one device's training.

``python examples/train_vit.py`` trains on one device, then starts local ranks for each mode;
``torchrun --nproc-per-node 4 examples/train_vit.py --modes 2d`` runs one mode by hand and leaves
``2d.json`` in the folder that ``--out`` names. All runs start from the same weights and take the
same batches. Width and heads are those of ViT-Tiny, which ``--layers 12`` makes it but for its
images' size. ``train_vit.svg`` is the picture with ``--layers 12`` and all other options left
alone.
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
from vit_results import ALONE, MODES, Run, picture, summary

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
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=MODES,
        default=list(MODES),
        help="modes to run; 1d and 2d take 4 ranks, the others 8",
    )
    parser.add_argument("--epochs", type=int, default=6, help="times through the training images")
    batch = "images in the global batch, a multiple of 8"
    parser.add_argument("--batch", type=int, default=64, help=batch)
    parser.add_argument(
        "--layers",
        type=int,
        default=4,
        help="transformer blocks; 12 make it a ViT-Tiny, and each step three times as long",
    )
    rate = "AdamW's learning rate at the end of the warmup"
    parser.add_argument("--lr", type=float, default=5e-4, help=rate)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("build/train_vit"),
        help="folder for the picture, curves.svg, and each run's numbers",
    )
    options = parser.parse_args()
    for name in ("epochs", "batch", "layers"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; it must be at least 1")
    if options.batch % 8:
        parser.error(
            f"--batch is {options.batch}; mode 2.5d and 3d split it over 4 ranks or 8: give a "
            "multiple of 8"
        )
    if "RANK" in os.environ and len(options.modes) != 1:
        parser.error("under torchrun one mode runs: give --modes one")
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


def network(layers: int) -> torch.nn.Module:
    """transformers' class, unmodified, without dropout so that runs can be compared; the same
    weights on every rank and in every run.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    tiny = dict(
        hidden_size=192, num_attention_heads=3, intermediate_size=768, num_hidden_layers=layers
    )
    images = dict(image_size=8, patch_size=2, num_channels=1, num_labels=CLASSES)
    config = transformers.ViTConfig(
        **tiny, **images, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return transformers.ViTForImageClassification(config)


def sample(data: Digits, batch: int) -> dict[str, torch.Tensor]:
    return dict(pixel_values=data.train[:batch], labels=data.train_labels[:batch])


def train(
    model: torch.nn.Module, data: Digits, options: argparse.Namespace, label: str, quiet: bool
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
        disable=quiet,
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
    return Run(losses, accuracies, statistics.median(seconds))


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


def distributed(mode: str, options: argparse.Namespace) -> Run:
    """The same training in one mode; to be called on each of its ranks."""
    data, ranks = digits(), MODES[mode]["size"]
    given: dict[str, Any] = dict(
        cluster="cpu",
        optimizer="fused-adamw",
        parallel=dict(tensor=dict(MODES[mode], mode=mode)),
        progress=False,
    )
    compiled = autopar.compile(network(options.layers), sample(data, options.batch), ranks, **given)
    return train(compiled, data, options, f"{mode} on {ranks} ranks", quiet=dist.get_rank() != 0)


def everything(options: argparse.Namespace) -> None:
    """All runs, the table and the picture."""
    runs = {ALONE: train(network(options.layers), digits(), options, ALONE, quiet=False)}
    runs[ALONE].save(options.out / "alone.json")
    for mode in options.modes:
        launch(MODES[mode]["size"], f"mode {mode}: ", "--modes", mode)
        runs[mode] = Run.load(options.out / f"{mode}.json")
    drawing = options.out / "curves.svg"
    drawing.write_text(picture(runs, options.epochs), encoding="utf-8")
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
        run = distributed(options.modes[0], options)
        if os.environ["RANK"] == "0":
            run.save(options.out / f"{options.modes[0]}.json")
        dist.barrier()


if __name__ == "__main__":
    main()
