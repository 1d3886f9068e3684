"""The software that runs a program on the devices: the seconds of a step that no kernel works.

The same GPUs take different times under eager PyTorch and under Megatron-LM. So a cluster keeps
these figures apart from those of its hardware, and a cluster's file may hold them for several
programs.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost_model.checks import check_fraction, check_positive


@dataclass(frozen=True)
class Software:
    """The figures of one software on one kind of device.

    Attributes:
        name: for example "eager" (PyTorch without a compiler).
        launch: seconds from the start of one kernel to the start of the next, even for the
            smallest kernels.
        overhead: seconds of a step outside its kernels, for example to read the loss and for the
            optimizer's work on the host.
        overlap: the part of the gradients' collectives that the last backward hides, 0 to 1.
        jitter: standard deviation, in seconds, of the moments at which ranks arrive at a
            collective. The collective waits for the last of them, longer where ranks are many.
        reserve: bytes of a device's memory that its context and the buffers of its communication
            library take.
        fuses: whether a compiler joins pointwise operators and reductions into one kernel, which
            reads and writes memory once.
    """

    name: str
    launch: float
    overhead: float = 0.0
    overlap: float = 0.5
    jitter: float = 0.0
    reserve: int = 0
    fuses: bool = False

    def __post_init__(self) -> None:
        for field in ("launch", "overhead", "jitter", "reserve"):
            check_positive(f"software.{self.name}.{field}", getattr(self, field), zero=True)
        check_fraction(
            f"software.{self.name}.overlap", self.overlap, "the collectives that is hidden"
        )
