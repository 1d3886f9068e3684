"""Which tensor of a model a stored tensor is: by the rules of ``transformers`` where the model is
one of its models. The only file that knows how ``transformers`` calls them inside.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autopar.errors import RunError
from autopar.runtime.values.pretrained.stored_tensor import StoredTensor
from autopar.runtime.values.transformers_models import is_transformers_model

# A buffer of a model, and the names that its file may hold beside it.
_OLD_BUFFERS = (
    ("rotary_emb.inv_freq", r"rotary_emb\.inv_freq"),
    ("position_ids", r"(^|\.)position_ids$"),
)
_REWRITE = (
    "let transformers write the model anew, in its own names: "
    "model.save_pretrained(new_folder, save_original_format=False)"
)


def match(
    model: nn.Module, stored: Mapping[str, StoredTensor]
) -> tuple[dict[str, torch.Tensor], set[str]]:
    """The stored tensors by the names in ``model.state_dict()``, and the names of those that the
    model does not have.

    Raises :class:`RunError` where a rule of ``transformers`` cannot be followed.
    """
    if not is_transformers_model(model):
        own = model.state_dict(keep_vars=True).keys()
        return {n: t for n, t in stored.items() if n in own}, set(stored) - own
    try:
        with torch.no_grad():
            return _Match(model).of(stored)
    except ImportError as e:
        version = getattr(sys.modules["transformers"], "__version__", "unknown")
        raise RunError(
            f"load_pretrained follows the rules by which transformers 5 names tensors, and this is "
            f"transformers {version} ({e}): install another version, or load a state dict with "
            "compiled.load_state_dict"
        ) from None


def without_ignored(model: nn.Module, names: set[str], kind: str) -> set[str]:
    """The ``names`` of ``kind`` (``"missing"``, ``"unexpected"``) of which ``from_pretrained``
    tells: not those about which the model's class is silent, nor buffers that older files held.
    """
    if not is_transformers_model(model):
        return names
    patterns = set(getattr(model, f"_keys_to_ignore_on_load_{kind}", None) or ())
    buffers = [name for name, _ in model.named_buffers()]
    if kind == "unexpected":
        patterns |= {p for ending, p in _OLD_BUFFERS if any(b.endswith(ending) for b in buffers)}
    return {n for n in names if not any(re.search(pattern, n) for pattern in patterns)}


class _Match:
    """What ``from_pretrained`` of ``transformers`` does with names."""

    def __init__(self, model: Any) -> None:
        from transformers import conversion_mapping, core_model_loading

        self._model, self._loading = model, core_model_loading
        self._own: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
        rules = conversion_mapping.get_model_conversion_mapping(model)
        converter = core_model_loading.WeightConverter
        self._converters = [rule for rule in rules if isinstance(rule, converter)]
        self._renamings = [rule for rule in rules if not isinstance(rule, converter)]
        self._by_pattern = {p: rule for rule in self._converters for p in rule.source_patterns}

    def of(self, stored: Mapping[str, StoredTensor]) -> tuple[dict[str, torch.Tensor], set[str]]:
        """The stored tensors by the model's names, converted, and the names of the others."""
        found: dict[str, torch.Tensor] = {}
        conversions: dict[str, Any] = {}
        unexpected: set[str] = set()
        for name in sorted(stored, key=self._loading.dot_natural_key):
            own, pattern = self._renamed(name)
            if own not in self._own:
                targets = [own] if pattern is None else self._by_pattern[pattern].target_patterns
                unexpected |= {own.replace(targets[0], target) for target in targets}
            elif pattern is None:
                found.setdefault(own, stored[name])
            else:
                rule = conversions.setdefault(own, copy.deepcopy(self._by_pattern[pattern]))
                rule.add_tensor(own, name, pattern, lambda tensor=stored[name]: tensor)
        for own, rule in conversions.items():
            for name, tensor in self._converted(own, rule).items():
                (found if name in self._own else {}).setdefault(name, tensor)
        return found, unexpected

    def _renamed(self, name: str) -> tuple[str, str | None]:
        prefix, rename = self._model.base_model_prefix, self._loading.rename_source_key
        own, pattern = rename(name, self._renamings, self._converters, prefix, self._own)
        if own not in self._own and name in self._own:
            return rename(name, [], [], prefix, self._own)
        return own, pattern

    def _converted(self, own: str, rule: Any) -> dict[str, torch.Tensor]:
        try:
            made = rule.convert(own, model=self._model, config=self._model.config)
        except Exception as e:  # code of transformers, for a file that may not fit it
            raise RunError(
                f"transformers cannot make {own} of what the files hold ({type(e).__name__}: {e}): "
                f"{_REWRITE}"
            ) from e
        made = made[0] if isinstance(made, tuple) else made  # transformers 5.0 returns more
        return {name: t[0] if isinstance(t, list) else t for name, t in made.items()}
