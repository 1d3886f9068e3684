"""Random numbers that depend on what is computed, not on which rank computes it or when.

A draw is a function of (seed, step, microbatch, node, chunk): ranks that hold the same chunk of a
tensor draw the same numbers, ranks that hold different chunks draw different ones, and recomputing
a node repeats its draw.

The seed comes from torch's default generator on rank 0. A call that trains advances the generator a
little, as it does on one device; evaluation leaves it alone. So what a user does to the generator
has the same effect as on one device. After ``manual_seed`` the draws start anew. A generator that
is put back to its state at an earlier call (the same seed again, ``fork_rng``, ``set_rng_state``)
repeats the draws of that call.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import torch

from autopar.errors import RunError

_REMEMBERED = 4096  # calls whose draws can be repeated by putting the generator back


class RandomStreams:
    """The random streams of a program, on one device.

    The code that runs the program calls :meth:`next_step`, and sets ``microbatch`` to the number of
    the microbatch that is computed. A recomputation sets ``moment``.

    Attributes: ``seed``, None until a seed is taken; ``step``, the number of the call that runs.
    Calls that train count up from 1, and other calls count down from -1, so that neither kind
    changes the other's draws.
    """

    def __init__(self, seed: int | None = None, device: torch.device | str = "cpu") -> None:
        self.seed, self.device = seed, torch.device(device)
        self.step = self.microbatch = 0
        self._trained = self._evaluated = 0
        # The seed of the default generator when this seed was taken.
        self._source: int | None = None
        # The place of the default generator at a call that trained -> the step of that call.
        self._known: dict[int, int] = {}

    def next_step(self, training: bool = True) -> None:
        """Begins another call of the program, with fresh numbers."""
        if training:
            self._trained += 1
            self.step = self._trained
        else:
            self._evaluated += 1
            self.step = -self._evaluated
        self.microbatch = 0

    def propose_seed(self, training: bool) -> int | None:
        """Reads the default generator before a call that draws. Returns a new seed, for
        :meth:`restart`, where the draws must start anew, and None where they go on.
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
        """Starts the draws of ``seed``, rank 0's proposal, at the first step; ``own`` is the seed
        that :meth:`propose_seed` returned on this rank.
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
        """A number for the state of the default generator, which advances. The number comes again
        only if the generator is put back.
        """
        generator = self._generator()
        if generator.device.type == "cuda":
            offset = generator.get_offset()  # known without waiting for the device
            generator.set_offset(offset + 4)
            text = struct.pack("<QQ", generator.initial_seed() % 2**64, offset)
            return int.from_bytes(blake2b(text, digest_size=7).digest(), "little")
        number = torch.empty((), dtype=torch.int64, device=generator.device)
        return int(number.random_(generator=generator).item())

    @property
    def trained(self) -> int:
        """The number of calls that drew in training since the seed was taken."""
        return self._trained

    @property
    def moment(self) -> tuple[int | None, int, int]:
        """The seed, step and microbatch, on which draws depend besides the node and the chunk."""
        return self.seed, self.step, self.microbatch

    @moment.setter
    def moment(self, value: tuple[int | None, int, int]) -> None:
        self.seed, self.step, self.microbatch = value

    @property
    def state(self) -> torch.Tensor:
        """All that later draws depend on, as three integers: the seed (-1 if none is taken yet),
        the number of calls that trained, and the number of other calls.
        """
        return torch.tensor(
            [-1 if self.seed is None else self.seed, self._trained, self._evaluated],
            dtype=torch.int64,
            device="cpu",
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
        """A context that afterwards restores these streams and the default generator."""
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
        """The seed of a node's draw for the chunk ``coordinate``. A node with a negative number
        draws the same numbers in all microbatches.
        """
        text = struct.pack(
            "<5q",
            self.seed or 0,
            self.step,
            self.microbatch if node_id >= 0 else 0,
            node_id,
            coordinate,
        )
        # 7 bytes, because manual_seed takes a signed 64-bit number.
        return int.from_bytes(blake2b(text, digest_size=7).digest(), "little")

    @contextmanager
    def seeded_for(self, node_id: int, coordinate: int) -> Iterator[None]:
        """A context in which the device's default generator draws this node's numbers for the chunk
        ``coordinate``, and which afterwards restores the generator.
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
