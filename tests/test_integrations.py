"""autopar does not import the packages of trainers; its adapters do."""

from __future__ import annotations

import subprocess
import sys

TRAINERS = "accelerate", "lightning", "peft", "transformers"


def test_autopar_imports_no_trainer() -> None:
    code = f"import sys, autopar; print([name for name in {TRAINERS} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
