"""Random numbers that depend on what is computed, not on which rank computes it or when.

A draw is a function of (seed, step, microbatch, node, chunk): ranks that hold the same chunk of a tensor draw the same numbers,
ranks that hold different chunks draw different ones, and recomputing a node repeats its draw.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import torch


class Streams:
    """The random streams of a program, on one device.

    ``step`` counts calls of the program and ``microbatch`` is the one being computed; whoever runs the program sets both, also
    around a recomputation.
    """

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        self.seed, self.device = seed, torch.device(device)
        self.step = 0
        self.microbatch = 0

    def next_step(self) -> None:
        """Begin another call of the program, with fresh numbers."""
        self.step += 1
        self.microbatch = 0

    def key(self, node_id: int, coordinate: int) -> int:
        """The seed of one node's draw of the chunk ``coordinate``."""
        text = struct.pack("<5q", self.seed, self.step, self.microbatch, node_id, coordinate)
        return int.from_bytes(blake2b(text, digest_size=7).digest(), "little")  # 7 bytes: manual_seed takes a signed 64-bit number

    @contextmanager
    def of(self, node_id: int, coordinate: int) -> Iterator[None]:
        """Within, the device's default generator draws this node's numbers for chunk ``coordinate``; after, it is as it was."""
        generator = self._generator()
        state = generator.get_state()
        generator.manual_seed(self.key(node_id, coordinate))
        try:
            yield
        finally:
            generator.set_state(state)

    def _generator(self) -> torch.Generator:
        if self.device.type == "cuda":
            index = self.device.index
            return torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]
        return torch.default_generator
