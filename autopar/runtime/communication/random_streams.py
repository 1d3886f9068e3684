"""Random numbers that depend on what is computed, not on which rank computes it or when.

A draw is a function of (seed, step, microbatch, node, chunk): ranks that hold the same chunk of a
tensor draw the same numbers, ranks that hold different chunks draw different ones, and recomputing
a node repeats its draw.

The seed comes from torch's default generator, that of rank 0. A call that trains moves the
generator a little, as it does on one device; evaluation leaves it alone. So what a user does to the
generator has the effect that it has there: after ``manual_seed`` the draws start anew, and a
generator that is put back to where it was at an earlier call (the same seed again, ``fork_rng``,
``set_rng_state``) repeats the draws of that call.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import torch

from autopar.errors import RunError

_REMEMBERED = 4096  # calls that can be repeated by putting the generator back


class RandomStreams:
    """The random streams of a program, on one device.

    Whoever runs the program calls :meth:`next_step` and sets ``microbatch``, the one being
    computed; around a recomputation also ``moment``.

    Attributes: ``seed``, None as long as nobody gave one; ``step``, of the call that runs: calls
    that train count up from 1, others down from -1, so that neither moves the other's draws.
    """

    def __init__(self, seed: int | None = None, device: torch.device | str = "cpu") -> None:
        self.seed, self.device = seed, torch.device(device)
        self.step = self.microbatch = 0
        self._trained = self._evaluated = 0
        self._source: int | None = (
            None  # what the default generator was seeded with when the seed was taken
        )
        self._known: dict[
            int, int
        ] = {}  # where the generator was at a call that trained -> its step

    def next_step(self, training: bool = True) -> None:
        """Begin another call of the program, with fresh numbers."""
        if training:
            self._trained += 1
            self.step = self._trained
        else:
            self._evaluated += 1
            self.step = -self._evaluated
        self.microbatch = 0

    def propose_seed(self, training: bool) -> int | None:
        """Looks at the default generator before a call that draws; a new seed where the draws are
        to start anew, for :meth:`restart`.
        """
        if not training:
            return self._place() if self.seed is None else None
        source, place = self._generator().initial_seed(), self._place()
        fresh = self.seed is None or (self._source is not None and source != self._source)
        if self._source is None:
            self._source = source
        if fresh:
            return place
        if place in self._known:
            self._trained = self._known[place]
        self._remember(place)
        return None

    def restart(self, own: int, seed: int) -> None:
        """From now on draws are of ``seed``, from the first step; ``own`` is what :meth:`propose_seed`
        gave on this rank.
        """
        self.seed, self._source = seed, self._generator().initial_seed()
        self._trained = self._evaluated = 0
        self._known = {}
        self._remember(own)

    def _remember(self, place: int) -> None:
        self._known[place] = self._trained
        if len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]

    def _place(self) -> int:
        """Where the default generator is, which moves on: a number that comes again only if it is
        put back.
        """
        generator = self._generator()
        if generator.device.type == "cuda":
            offset = generator.get_offset()  # known without waiting for the device
            generator.set_offset(offset + 4)
            text = struct.pack("<QQ", generator.initial_seed() % 2**64, offset)
            return int.from_bytes(blake2b(text, digest_size=7).digest(), "little")
        return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())

    @property
    def trained(self) -> int:
        """How many calls drew in training, since the seed was taken."""
        return self._trained

    @property
    def moment(self) -> tuple[int | None, int, int]:
        """What draws depend on besides node and chunk."""
        return self.seed, self.step, self.microbatch

    @moment.setter
    def moment(self, value: tuple[int | None, int, int]) -> None:
        self.seed, self.step, self.microbatch = value

    @property
    def state(self) -> torch.Tensor:
        """Seed, steps that trained, and others: all that later draws depend on. A seed of -1 is one
        that was not taken yet.
        """
        return torch.tensor(
            [-1 if self.seed is None else self.seed, self._trained, self._evaluated],
            dtype=torch.int64,
        )

    @state.setter
    def state(self, value: torch.Tensor) -> None:
        if not isinstance(value, torch.Tensor) or value.shape != (3,) or value.is_floating_point():
            raise RunError(
                "a random state is a tensor of three integers, as random_state gives it, not "
                f"{value!r:.80}"
            )
        seed, self._trained, self._evaluated = value.tolist()
        self.seed = None if seed < 0 else seed
        self._source = None if self.seed is None else self._generator().initial_seed()
        self._known = {}

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """After it, everything is as it was, the default generator too."""
        generator = self._generator()
        state, moment, known = generator.get_state(), self.moment, dict(self._known)
        rest = self._trained, self._evaluated, self._source
        try:
            yield
        finally:
            generator.set_state(state)
            self.moment, self._known = moment, known
            self._trained, self._evaluated, self._source = rest

    def draw_seed(self, node_id: int, coordinate: int) -> int:
        """The seed of one node's draw of the chunk ``coordinate``; one with a negative number draws
        alike in all microbatches.
        """
        text = struct.pack(
            "<5q",
            self.seed or 0,
            self.step,
            self.microbatch if node_id >= 0 else 0,
            node_id,
            coordinate,
        )
        return int.from_bytes(
            blake2b(text, digest_size=7).digest(), "little"
        )  # 7 bytes: manual_seed takes a signed 64-bit number

    @contextmanager
    def seeded_for(self, node_id: int, coordinate: int) -> Iterator[None]:
        """Within, the device's default generator draws this node's numbers for chunk
        ``coordinate``; after, it is as it was.
        """
        generator = self._generator()
        state = generator.get_state()
        generator.manual_seed(self.draw_seed(node_id, coordinate))
        try:
            yield
        finally:
            generator.set_state(state)

    def _generator(self) -> torch.Generator:
        if self.device.type == "cuda":
            index = self.device.index
            return torch.cuda.default_generators[
                torch.cuda.current_device() if index is None else index
            ]
        return torch.default_generator
