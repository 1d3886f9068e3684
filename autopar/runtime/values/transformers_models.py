"""Models of ``transformers``, without importing it: where a model is one, it is imported."""

from __future__ import annotations

import sys
from collections.abc import Callable

from torch import nn


def is_transformers_model(model: nn.Module) -> bool:
    """Whether the model is one of ``transformers``, without importing it."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(model, library.PreTrainedModel)


def own_initialisation(model: nn.Module) -> Callable[[], None] | None:
    """What initialises a model of ``transformers`` whose class does not say it itself, and nothing
    else: ``init_weights`` also ties tensors, which it takes anew for that.
    """
    if not is_transformers_model(model):
        return None
    library = sys.modules["transformers.modeling_utils"]
    general, own = library.PreTrainedModel.init_weights, getattr(type(model), "init_weights", None)
    if own is not general:
        return None
    return getattr(model, "initialize_weights", None)
