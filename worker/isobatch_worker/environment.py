"""Reads what of this machine and installation fixes the bits: arithmetic and versions."""

import hashlib
import platform
from importlib import metadata
from pathlib import Path

import torch
from isobatch_kernels.plan import Arithmetic

from isobatch_worker.seams import vllm_version


def read_arithmetic() -> Arithmetic:
    """CPU model, instruction sets and caches (libraries choose kernels by both), and threads."""
    flags, model = "", platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            model = value.strip()
        if key.strip() in ("flags", "Features"):
            flags = " ".join(sorted(value.split()))
            break
    caches = "/".join(
        (index / "size").read_text().strip()
        for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"))
        if (index / "size").exists()
    )
    return Arithmetic(
        device=f"cpu {model} caches={caches}",
        isa=f"{torch.backends.cpu.get_cpu_capability()} "
        f"{hashlib.sha256(flags.encode()).hexdigest()[:16]}",
        threads=torch.get_num_threads(),
    )


def read_versions() -> dict[str, str]:
    """Versions of what computes."""
    return {
        "isobatch": metadata.version("isobatch"),
        "vllm": vllm_version(),
        "torch": torch.__version__,
        "numpy": metadata.version("numpy"),
        "triton": metadata.version("triton"),
    }
