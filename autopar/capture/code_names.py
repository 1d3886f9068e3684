"""The global names that a function's code mentions, and their values."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from dis import opmap
from types import CodeType, ModuleType
from typing import Any

# Libraries whose code is taken to be the same at each call: torch and what it is made of, numpy,
# what downloads and reads files, and autopar itself, whose registries are read by themselves.
_FIXED = {
    *("torch", "numpy", "sympy", "mpmath", "networkx", "jinja2", "fsspec", "filelock"),
    *("huggingface_hub", "safetensors", "tokenizers", "tqdm", "yaml", "regex", "packaging"),
    "autopar",
}
_IMPORT = opmap["IMPORT_NAME"]


@functools.lru_cache(maxsize=4096)
def is_own(file: str | None) -> bool:
    """Whether the code of a file, given by its module's name, may differ from call to call."""
    root = str(file).partition(".")[0]
    return root not in _FIXED and root not in sys.stdlib_module_names


def global_reads(code: CodeType, file: dict[str, Any]) -> Iterator[tuple[int, str, Any]]:
    """The global names that code mentions, each with the id of its file and its value.

    Of modules, such as ``config`` in ``config.WINDOW``, these are the names that the code mentions,
    too. Code that calls ``globals`` may read every name of its file.
    """
    names = _names(code)
    yield from _named(file, tuple(file) if "globals" in names else names, names, {id(file)})
    for path in _imported(code, str(file.get("__package__"))):
        module = sys.modules.get(path)
        if module is not None and is_own(path):
            yield from _named(vars(module), names, names, {id(file), id(vars(module))})


@functools.lru_cache(maxsize=65536)
def _imported(code: CodeType, package: str) -> tuple[str, ...]:
    """The names that modules may have which code imports where it runs."""
    if not any(_IMPORT in c.co_code[::2] for c in codes_of(code)):
        return ()
    parts = package.split(".")
    outer = [".".join(parts[: i + 1]) + "." for i in range(len(parts))]
    return tuple(prefix + name for name in _names(code) for prefix in ("", *outer))


def _named(
    file: dict[str, Any], names: tuple[str, ...], inner: tuple[str, ...], seen: set[int]
) -> Iterator[tuple[int, str, Any]]:
    """The values of names in a file; of modules among them, the values of the names ``inner``."""
    is_fixed = not is_own(file.get("__name__"))
    for name in names:
        if name not in file:
            continue
        value = file[name]
        if not isinstance(value, ModuleType):
            if not is_fixed or callable(value):  # a library's containers are its own matter
                yield id(file), name, value
        elif id(vars(value)) not in seen and not is_fixed:
            seen.add(id(vars(value)))
            yield id(file), name, value.__name__
            yield from _named(vars(value), inner, inner, seen)


@functools.lru_cache(maxsize=65536)
def _names(code: CodeType) -> tuple[str, ...]:
    """The names that code and the functions inside it mention."""
    return tuple(dict.fromkeys(name for c in codes_of(code) for name in c.co_names))


def codes_of(code: CodeType) -> Iterator[CodeType]:
    """Code and that of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_of(constant)
