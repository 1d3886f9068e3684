"""One call of a plan's program on one rank: its storages, its saved tensors and its gradients."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.kernel_trace.footprint import Footprint
from autopar.memory.folding import TracedBlock


@dataclass(eq=False)
class TracedStorage:
    """One storage of ``nbytes``, made by ``call``."""

    nbytes: int
    call: TracedCall


@dataclass(eq=False)
class GradientSlot:
    """The place where the gradients of one tensor are added up.

    The tensor is a result of ``call``, or the ``parameter`` of this name.
    """

    call: TracedCall | None = None
    parameter: str = ""


@dataclass(eq=False)
class TracedCall:
    """A call or a conversion on one rank.

    Attributes:
        name: the name of the node; of a conversion, the node and the layout after it.
        order: the place of the node in the graph, then the number among its conversions.
        stage: the pipeline stage; None if each stage makes the call for itself.
        block: the block that it is part of, in a run of equal blocks; None outside.
        reads: the storages of its operands, without parameters, buffers and inputs, which exist
            during the whole step.
        saved: the storages of operands and results that its backward reads.
        internal: bytes of further tensors that its backward reads.
        cloned: bytes of buffers that it writes to. Recomputation needs a copy of their old values.
        made: the storages of its results.
        later: conversions that continue from this conversion.
        is_read: whether a call reads the result; False where only a further conversion does.
        footprint: the memory that it takes while it runs.
        operand_slots: where its backward adds each operand's gradient; None for no gradient.
        result_slots: where the gradients of its results are added up.
        joined_slices: the slices that lowering joins into one split, this call among them; unless
            one of them is recomputed.
        starts: the gather of a ZeRO bucket that it starts: the results have memory from here on.
        is_started: whether an earlier call starts it.
        before: the gather of the ZeRO bucket before, which starts in the backward, if that makes
            both again, when this one is done.
        is_view: whether it launches no kernel.
        fuses, fuses_back: whether a compiler fuses the kernels of its forward, and of its backward,
            with those of other calls.
        may_repeat: whether a compiler may compute it again in the backward, in a fused kernel.
        part: the number of the part of the program that is compiled with it alone.
        wide: the part of ``internal`` that a compiler has the backward compute again from the
            operands: tensors about as large as these.
    """

    name: str
    order: tuple[float, int]
    stage: int | None
    block: TracedBlock | None = None
    reads: list[TracedStorage] = field(default_factory=list)
    saved: list[TracedStorage] = field(default_factory=list)
    internal: int = 0
    cloned: int = 0
    made: list[TracedStorage] = field(default_factory=list)
    later: list[TracedCall] = field(default_factory=list)
    is_read: bool = True
    footprint: Footprint = field(default_factory=Footprint)
    operand_slots: list[GradientSlot | None] = field(default_factory=list)
    result_slots: list[GradientSlot] = field(default_factory=list)
    joined_slices: list[TracedCall] = field(default_factory=list)
    starts: TracedCall | None = None
    is_started: bool = False
    before: TracedCall | None = None
    is_view: bool = False
    fuses: bool = False
    fuses_back: bool = False
    may_repeat: bool = False
    part: int = 0
    wide: int = 0

    @property
    def made_bytes(self) -> int:
        """Bytes of the storages of its results."""
        return sum(storage.nbytes for storage in self.made)


@dataclass(frozen=True)
class StageInput:
    """A tensor that a stage receives from the stage before.

    Attributes:
        stage: the stage that receives it.
        sent: its storage in the stage before; None for a parameter or an input of the program.
        storage: its storage in this stage.
        source: where its gradients are added up in the stage before; None for no gradient.
        slot: where its gradients are added up in this stage; None for no gradient.
    """

    stage: int
    sent: TracedStorage | None
    storage: TracedStorage
    source: GradientSlot | None
    slot: GradientSlot | None
