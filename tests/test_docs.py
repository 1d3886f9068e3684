"""README.md and the pages of docs/ are true: their Python runs and prints the text that they show,
and the paths that they name exist.

All Python blocks of a page run in one namespace, from top to bottom. A block marked as ``text``
shows the output of the Python blocks since the last one: a line ``...`` stands for any lines, and
``…`` inside a line for any characters. Two comments, which readers do not see, are read here:
``<!-- run`` ... ``-->`` is more Python, and ``<!-- ranks: 4 -->`` runs the page on 4 ranks and
takes the output of the last rank.

``python tests/test_docs.py docs/layouts.md`` writes the outputs into a page.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest

from autopar.search.space import options

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LARGE = ("choosing-a-plan", "limits", "modes", "options", "reading-a-report")
TRAINING = ("how-it-works", "trainers", "training")
SLOW = {f"docs/{name}.md" for name in (*LARGE, *TRAINING)}  # large models, or many runs
BLOCK = re.compile(
    r"^(?:```(python|text)\n(.*?)^```|<!-- (run)\n(.*?)^-->)", re.DOTALL | re.MULTILINE
)
PAGE_SECONDS = 800.0  # alone, a page takes three minutes at most
FOLDERS = "autopar|passes|cost_model|tests|docs|examples|benchmarks|\\.ci"


class Block(NamedTuple):
    """A block of a page: Python to run, or the text that it prints."""

    kind: str  # "python" or "text"
    content: str
    line: int
    span: tuple[int, int]  # of the content, in characters of the page


def blocks(page: str) -> list[Block]:
    """The blocks of a page that run or show an output, in order."""
    found = []
    for match in BLOCK.finditer(page):
        group = 2 if match[1] else 4
        start = match.start(group)
        kind = "text" if match[1] == "text" else "python"
        found.append(Block(kind, match[group], page.count("\n", 0, start), match.span(group)))
    return found


def run_on_this_rank(page: Path, results: Path) -> None:
    """Runs a page's Python and writes the output of each block, as a JSON list, to ``results``."""
    options.DEFAULT_SECONDS = math.inf  # no clock decides, on a busy machine either
    names = {"__name__": "__main__"}
    outputs = []
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.kind == "python":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile("\n" * block.line + block.content, str(page), "exec"), names)
            outputs.append(out.getvalue())
    results.write_text(json.dumps(outputs))


def outputs_of(page: Path) -> list[str]:
    """The text that each Python block of a page prints on its last rank."""
    found = re.search(r"<!-- ranks: (\d+) -->", page.read_text(encoding="utf-8"))
    ranks = int(found[1]) if found else 1
    with tempfile.TemporaryDirectory() as folder:
        shared = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "OMP_NUM_THREADS": 1}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        shared |= {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
        processes = []
        for rank in range(ranks):
            place = Path(folder) / str(rank)
            place.mkdir()
            own = shared | {"RANK": rank, "LOCAL_RANK": rank}
            environment = {**os.environ, **{name: str(value) for name, value in own.items()}}
            command = [sys.executable, __file__, "--rank", str(page), str(place / "outputs.json")]
            process = subprocess.Popen(
                command, cwd=place, env=environment, stderr=subprocess.PIPE, text=True
            )
            processes.append(process)
        try:
            errors = [process.communicate(timeout=PAGE_SECONDS)[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.communicate()  # closes its pipe
        for process, error in zip(processes, errors, strict=True):
            assert process.returncode == 0, error[-4000:]
        return json.loads((place / "outputs.json").read_text())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def shown_and_printed(page: str, outputs: list[str]) -> list[tuple[Block, str]]:
    """Each shown output with the text that was printed since the one before."""
    found, printed = [], ""
    remaining = iter(outputs)
    for block in blocks(page):
        if block.kind == "python":
            printed += next(remaining)
        else:
            found.append((block, printed))
            printed = ""
    return found


def is_shown(shown: str, printed: str) -> bool:
    """Whether ``shown`` is ``printed``, but for what ``...`` and ``…`` stand for."""
    lines = [line.rstrip() for line in shown.strip("\n").splitlines()]
    pattern = "\n".join(
        "(?s:.*)" if line == "..." else re.escape(line).replace("…", ".*") for line in lines
    )
    text = "\n".join(line.rstrip() for line in printed.strip("\n").splitlines())
    return re.fullmatch(pattern, text) is not None


def write_outputs(page: Path) -> None:
    """Writes the outputs that a page shows otherwise than its blocks print them."""
    text = page.read_text(encoding="utf-8")
    for block, printed in reversed(shown_and_printed(text, outputs_of(page))):
        if not is_shown(block.content, printed):
            clean = "\n".join(line.rstrip() for line in printed.strip("\n").splitlines())
            text = f"{text[: block.span[0]]}{clean}\n{text[block.span[1] :]}"
    page.write_text(text, encoding="utf-8")


def parameter(page: Path) -> object:
    name = str(page.relative_to(ROOT))
    return pytest.param(page, id=name, marks=[pytest.mark.slow] if name in SLOW else [])


WITH_CODE = [parameter(page) for page in PAGES if "```python" in page.read_text(encoding="utf-8")]


@pytest.mark.timeout(PAGE_SECONDS + 60)
@pytest.mark.parametrize("page", WITH_CODE)
def test_python_runs_and_prints_the_text_shown(page: Path) -> None:
    pytest.importorskip("transformers")
    for block, printed in shown_and_printed(page.read_text(encoding="utf-8"), outputs_of(page)):
        assert is_shown(block.content, printed), (
            f"{page}:{block.line + 1} shows another output than:\n{printed}"
        )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_links_and_targets_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    missing = [path for path in paths_in(prose) if not (ROOT / path).exists()]
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose)
    missing += [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z][a-z-]*)", prose)) <= targets


def paths_in(prose: str) -> list[str]:
    """The files and folders in backticks that begin with a folder of the repository."""
    return [path for path in re.findall(r"`([\w./-]+)`", prose) if re.match(rf"({FOLDERS})/", path)]


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1]
    named = set(re.findall(r": ([\w/.-]+\.md)", navigation))
    assert named == {str(page.relative_to(ROOT / "docs")) for page in PAGES[1:]}


def test_pictures_are_those_that_the_script_draws(tmp_path: Path) -> None:
    images = ROOT / "docs/images"
    subprocess.run([sys.executable, str(ROOT / "docs/pictures"), str(tmp_path)], check=True)
    drawn = {path.name: path.read_text() for path in tmp_path.glob("*.svg")}
    committed = [path for path in images.glob("*.svg") if not path.is_symlink()]
    assert drawn == {path.name: path.read_text() for path in committed}


def test_site_is_built_without_warnings() -> None:
    pytest.importorskip("zensical")
    command = [str(Path(sys.executable).parent / "zensical"), "build", "--strict"]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        run_on_this_rank(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        for name in sys.argv[1:]:
            write_outputs(ROOT / name)
