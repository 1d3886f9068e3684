"""A language model cut into pipeline stages by hand, for torch.distributed.pipelining: what a
planned pipeline is compared with.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


class Part(nn.Module):
    """Layers ``start`` to ``stop`` of a GPT-2 or a Llama, with the embedding before the first and
    the head after the last.
    """

    def __init__(self, model: Any, start: int, stop: int) -> None:
        super().__init__()
        gpt2 = hasattr(model, "transformer")
        body = model.transformer if gpt2 else model.model
        layers = body.h if gpt2 else body.layers
        self.layers = layers[start:stop]
        self.tokens = None if start else body.wte if gpt2 else body.embed_tokens
        self.places = body.wpe if gpt2 and not start else None
        self.rotary = None if gpt2 else body.rotary_emb
        self.head = (
            nn.Sequential(body.ln_f if gpt2 else body.norm, model.lm_head)
            if stop == len(layers)
            else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1], device=x.device)[None]
        if self.tokens is not None:
            x = self.tokens(x)
        if self.places is not None:
            x = x + self.places(places)
        options = {} if self.rotary is None else dict(position_embeddings=self.rotary(x, places))
        for layer in self.layers:
            x = layer(x, **options)
        return x if self.head is None else self.head(x)


class ByHand:
    """This rank's part of ``model`` on torch's 1F1B, for one batch in ``microbatches``."""

    def __init__(self, model: Any, tokens: torch.Tensor, microbatches: int) -> None:
        self.rank, self.ranks, self.tokens, self.microbatches = (
            dist.get_rank(),
            dist.get_world_size(),
            tokens,
            microbatches,
        )
        vocabulary, loss_function = model.config.vocab_size, model.loss_function

        def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return loss_function(logits=logits, labels=labels, vocab_size=vocabulary) / microbatches

        cuts = boundaries(model.config.num_hidden_layers, self.ranks)
        self.part = Part(model, *list(pairwise(cuts))[self.rank])
        self.loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = loss
        stage = PipelineStage(self.part, self.rank, self.ranks, tokens.device)
        self.schedule = Schedule1F1B(stage, microbatches, loss_fn=loss, scale_grads=False)

    def backward(self) -> torch.Tensor:
        """Forward and backward of the batch; the loss in the last rank, 0 in the others."""
        losses: list[torch.Tensor] = []
        last = self.rank == self.ranks - 1
        given = [self.tokens] if self.rank == 0 else []
        self.schedule.step(
            *given, target=self.tokens if last else None, losses=losses, return_outputs=False
        )
        return (
            torch.stack(losses).sum().detach()
            if last
            else torch.zeros((), device=self.tokens.device)
        )

    def alone(self, width: int, wait: Callable[[], None]) -> tuple[float, float]:
        """Seconds of this part's forward and backward of a microbatch, with nothing sent; ``wait``
        is called before a clock is read.
        """
        tokens = self.tokens.chunk(self.microbatches)[0]
        received = (
            torch.randn(*tokens.shape, width, device=tokens.device, requires_grad=True)
            if self.rank
            else tokens
        )
        forward = backward = 0.0
        for _ in range(self.microbatches):
            wait()
            start = time.perf_counter()
            result = self.part(received)
            result = self.loss(result, tokens) if self.part.head is not None else result
            wait()
            middle = time.perf_counter()
            result.backward(None if self.part.head is not None else torch.ones_like(result))
            wait()
            forward, backward = forward + middle - start, backward + time.perf_counter() - middle
            received.grad = None
        return forward / self.microbatches, backward / self.microbatches


def boundaries(layers: int, parts: int) -> list[int]:
    """The first layer of each part, and the end."""
    return [layers * i // parts for i in range(parts + 1)]
