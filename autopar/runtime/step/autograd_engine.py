"""Callbacks and questions about the backward that autograd's engine runs.

The private names of torch's engine are in this file alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


class BackwardObserver:
    """Calls ``begins`` when a backward reaches a watched tensor, once in each backward, and
    ``ends`` when the whole backward is done.
    """

    def __init__(self, begins: Callable[[], None], ends: Callable[[], None]) -> None:
        self._begins, self._ends = begins, ends
        self._task = -1

    def watch(self, output: torch.Tensor) -> None:
        """Observes backwards through ``output``."""
        output.register_hook(self._reached)

    def _reached(self, _: torch.Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task == self._task:  # this backward has come through another output
            return
        self._task = task
        self._begins()
        torch.autograd.Variable._execution_engine.queue_callback(self._ends)  # type: ignore[attr-defined]


def is_graph_retained() -> bool:
    """Whether the running backward was called with ``retain_graph=True``."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())  # type: ignore[attr-defined]


def will_execute(node: torch.autograd.graph.Node) -> bool:
    """Whether the running backward will execute ``node``, that of a leaf. A backward that was
    asked for the gradients of other tensors will not.
    """
    return bool(torch._C._will_engine_execute_node(node))  # type: ignore[attr-defined]
