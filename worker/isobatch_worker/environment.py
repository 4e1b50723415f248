"""Reads what of this machine and installation fixes the bits: arithmetic and versions."""

import hashlib
import platform
from importlib import metadata
from pathlib import Path

import isobatch_kernels
import torch
from isobatch_kernels.plan import Arithmetic
from isobatch_kernels.tree import family_of

import isobatch_worker
from isobatch_worker.seams import vllm_version


def cpu_arithmetic() -> Arithmetic:
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


def cuda_arithmetic(device: torch.device) -> Arithmetic:
    """The card, its driver, and the family of its matrix units."""
    from vllm.third_party import pynvml  # of vLLM's wheel for CUDA alone

    pynvml.nvmlInit()
    driver = pynvml.nvmlSystemGetDriverVersion()
    pynvml.nvmlShutdown()
    card = torch.cuda.get_device_properties(device)
    capability = torch.cuda.get_device_capability(device)
    return Arithmetic(
        device=f"cuda {card.name} processors={card.multi_processor_count} driver={driver} "
        f"cuda={torch.version.cuda}",
        isa=family_of(capability).value,
        threads=0,
    )


def read_versions() -> dict[str, str]:
    """Versions of what computes; ours by its source too, so that an edit is another fingerprint."""
    return {
        "isobatch": metadata.version("isobatch"),
        "isobatch-source": _source_digest(),
        "vllm": vllm_version(),
        "torch": torch.__version__,
        "numpy": metadata.version("numpy"),
        "triton": metadata.version("triton"),
    }


def _source_digest() -> str:
    """First 16 hex digits of the SHA-256 over our own modules that compute or certify."""
    digest = hashlib.sha256()
    for package in (isobatch_kernels, isobatch_worker):
        for path in sorted(Path(package.__path__[0]).rglob("*.py")):
            digest.update(f"{path.relative_to(package.__path__[0])}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]
