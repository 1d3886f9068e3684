"""The configuration file of ``finetune_vit.py``: the model, its training, and plans by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Configuration:
    """What a configuration file says.

    Attributes:
        layers: transformer blocks of a model with random weights; 12 make it a ViT-Tiny.
        start_from: a folder that ``save_pretrained`` wrote, whose weights training starts from;
            None for random weights. A head for other classes is replaced.
        epochs: times through the training images.
        batch: images in the global batch.
        lr: AdamW's learning rate at the end of the warm-up.
        plans: by name, the options of ``autopar.compile`` and the number of ranks, "ranks".
    """

    layers: int
    start_from: str | None
    epochs: int
    batch: int
    lr: float
    plans: dict[str, dict[str, Any]]

    @staticmethod
    def read(path: Path) -> Configuration:
        """Raises ValueError, with what to change, for a file that is none."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as e:
            raise ValueError(f"{path} cannot be read as JSON: {e}") from e
        names = {field.name for field in dataclasses.fields(Configuration)}
        if not isinstance(data, dict) or set(data) != names:
            raise ValueError(f"{path}: give an object with {', '.join(sorted(names))}, no more")
        for name in ("layers", "epochs", "batch"):
            if not isinstance(data[name], int) or data[name] < 1:
                raise ValueError(f"{path}: {name} is {data[name]!r}; give a whole number above 0")
        for name, plan in data["plans"].items():
            if not isinstance(plan, dict) or not isinstance(plan.get("ranks"), int):
                raise ValueError(f'{path}: plan {name!r} is {plan!r}; give its "ranks"')
        return Configuration(**data)

    def ranks(self, plan: str) -> int:
        """The number of ranks of a plan."""
        return int(self.plans[plan]["ranks"])

    def options(self, plan: str) -> dict[str, Any]:
        """The options of a plan."""
        return {name: value for name, value in self.plans[plan].items() if name != "ranks"}
