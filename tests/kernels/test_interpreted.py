"""Runs the files of interpreted/ that hold tests, each in a process of its own: the interpreter is
chosen when Triton is imported, and the rest of the suite imports Triton as it is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).with_name("interpreted")
FILES = ("attention", "attention_proofs", "matmul", "moe", "rows", "row_proofs")
ROOT = FOLDER.parents[2]


@pytest.mark.parametrize("name", FILES)
def test_kernels_in_the_interpreter(name: str) -> None:
    path = FOLDER / f"{name}.py"
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
