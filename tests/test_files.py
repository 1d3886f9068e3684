"""Files are written whole, with the permissions, links and errors that a user expects."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from autopar.formatting.files import write_json, write_whole


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_a_new_file_has_what_the_umask_leaves_and_an_old_one_keeps_its_mode(
    tmp_path: Path,
) -> None:
    path = tmp_path / "plan.json"
    write_json(path, [1])
    assert mode_of(path) == 0o640
    path.chmod(0o604)
    write_json(path, [2])
    assert (mode_of(path), path.read_text()) == (0o604, "[2]\n")


def test_the_file_behind_a_link_is_written(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link, target = tmp_path / "link.json", tmp_path / "there" / "target.json"
    link.symlink_to(target)
    for value in (1, 2):  # the target is absent at first
        write_json(link, value)
        assert link.is_symlink()
        assert target.read_text() == f"{value}\n"


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_json(path, "old")

    def fails(temporary: str) -> None:
        Path(temporary).write_text("half of it")
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        write_whole(path, fails)
    assert path.read_text() == '"old"\n'
    assert os.listdir(tmp_path) == ["plan.json"]
