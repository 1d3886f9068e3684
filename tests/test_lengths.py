"""Files have at most 300 lines and functions at most 40, docstrings of functions not counted."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE_LINES = 300
FUNCTION_LINES = 40


def sources() -> list[Path]:
    """The Python files that git tracks; of an unpacked archive, those of the source folders."""
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode == 0 and listed.stdout:
        return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).exists()]
    folders = ("autopar", "benchmarks", "cost_model", "docs", "examples", "passes", "tests")
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def function_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of a function without its docstring and its decorators."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function, clean=False) is not None:
        docstring = function.body[0]
        lines -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
    return lines


def long_functions(text: str) -> dict[str, int]:
    """The functions of a file that are too long, with their lines."""
    functions = (
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    lines = {f"{f.name}, line {f.lineno}": function_lines(f) for f in functions}
    return {name: count for name, count in lines.items() if count > FUNCTION_LINES}


def test_files_are_short() -> None:
    lines = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in sources()}
    assert len(lines) > 100
    assert {name: count for name, count in lines.items() if count > FILE_LINES} == {}


def test_functions_are_short() -> None:
    found = {str(p.relative_to(ROOT)): long_functions(p.read_text()) for p in sources()}
    assert {name: functions for name, functions in found.items() if functions} == {}


def test_a_function_is_counted_without_its_docstring() -> None:
    body = "    x = 1\n" * (FUNCTION_LINES - 1)
    docstring = '    """One line,\n    and another.\n    """\n'
    assert long_functions(f"def f():\n{docstring}{body}") == {}
    assert long_functions(f"def f():\n{docstring}{body}    x = 2\n") == {"f, line 1": 41}
    assert long_functions(f"class A:\n  def f(self):\n{body}    x = 2\n") == {"f, line 2": 41}
