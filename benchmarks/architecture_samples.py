"""Sample batches for small models of transformers."""

from __future__ import annotations

from typing import Any

import torch

BATCH, LENGTH, VOCABULARY = 8, 16, 64  # samples, tokens of each, and different tokens
Sample = dict[str, Any]


def _ids() -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (BATCH, LENGTH))


def text() -> Sample:
    """Tokens, and the same tokens as labels, of which one column does not count."""
    ids = _ids()
    labels = ids.clone()
    labels[:, 3] = -100
    return {"input_ids": ids, "labels": labels}


def sentences() -> Sample:
    return {"input_ids": _ids(), "labels": torch.randint(2, (BATCH,))}


def tagged() -> Sample:
    return {"input_ids": _ids(), "labels": torch.randint(2, (BATCH, LENGTH))}


def questions() -> Sample:
    start, end = torch.randint(LENGTH, (2, BATCH))
    return {"input_ids": _ids(), "start_positions": start, "end_positions": end}


def _pixels(size: int) -> torch.Tensor:
    return torch.randn(BATCH, 3, size, size)


def images(size: int = 16) -> Sample:
    return {"pixel_values": _pixels(size), "labels": torch.randint(2, (BATCH,))}


def larger_images() -> Sample:
    return images(32)


def segmented() -> Sample:
    return {"pixel_values": _pixels(32), "labels": torch.randint(2, (BATCH, 32, 32))}


def masked_images() -> Sample:
    return {"pixel_values": _pixels(16), "noise": torch.rand(BATCH, 16)}


def pairs() -> Sample:
    return {"input_ids": _ids(), "pixel_values": _pixels(16), "return_loss": True}


def captions() -> Sample:
    ids = _ids()
    return {"input_ids": ids, "pixel_values": _pixels(16), "labels": ids.clone()}


def visual_questions() -> Sample:
    return {"input_ids": _ids(), "pixel_values": _pixels(16), "labels": torch.rand(BATCH, 4)}


def speech() -> Sample:
    return {"input_features": torch.randn(BATCH, 8, 32), "labels": _ids()}


def sounds() -> Sample:
    return {"input_values": torch.randn(BATCH, 400), "labels": torch.randint(2, (BATCH,))}


def transcripts() -> Sample:
    return {"input_values": torch.randn(BATCH, 400), "labels": torch.randint(1, 32, (BATCH, 5))}


def series() -> Sample:
    return {"past_values": torch.randn(BATCH, 32, 2), "future_values": torch.randn(BATCH, 8, 2)}
