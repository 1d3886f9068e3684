"""When a backward begins and when it ends, told by the tensors that it starts from; and what is
asked of it.

Private names of torch's engine stand here alone."""

from __future__ import annotations

from collections.abc import Callable

import torch


class BackwardObserver:
    """Calls ``begins`` when a backward reaches a watched tensor, once for each backward, and
    ``ends`` when all of it is done.

    Of several watches the first to watch a tensor begins first and ends first.
    """

    def __init__(self, begins: Callable[[], None], ends: Callable[[], None]) -> None:
        self._begins, self._ends = begins, ends
        self._task = -1

    def watch(self, output: torch.Tensor) -> None:
        """Watches for backwards that come through ``output``."""
        output.register_hook(self._reached)

    def _reached(self, _: torch.Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task == self._task:  # the same backward came here through another output
            return
        self._task = task
        self._begins()
        torch.autograd.Variable._execution_engine.queue_callback(self._ends)  # type: ignore[attr-defined]


def is_graph_retained() -> bool:
    """Whether the backward that is running was asked to retain its graph."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())  # type: ignore[attr-defined]


def will_execute(node: torch.autograd.graph.Node) -> bool:
    """Whether the backward that is running goes on to ``node``, a leaf's: one that is asked for
    certain tensors does not.
    """
    return bool(torch._C._will_engine_execute_node(node))  # type: ignore[attr-defined]
