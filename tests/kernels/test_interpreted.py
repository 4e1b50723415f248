"""Runs the files of each interpreted/ that hold tests, each in a process of its own.

The interpreter is chosen when Triton is imported, and the rest of the suite has it as it is.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
KERNELS = ("attention", "attention_proofs", "matmul", "moe", "rows", "row_proofs")
FILES = (
    *(f"kernels/interpreted/{name}.py" for name in KERNELS),
    "worker/interpreted/cuda_layers.py",
)


@pytest.mark.parametrize("file", FILES)
def test_kernels_in_the_interpreter(file: str) -> None:
    path = TESTS / file
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)]
    done = subprocess.run(
        command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
