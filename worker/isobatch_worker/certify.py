"""Performs the command `isobatch certify`: what a strict worker proves, without one that serves."""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from isobatch_contracts.numerics import Certified
from isobatch_contracts.tiers import PoolName
from isobatch_kernels.certification import CertificationRefused

from isobatch_worker.cache import plans_dir
from isobatch_worker.commands import settings_of
from isobatch_worker.compose import Launch, WrongUse, compose
from isobatch_worker.errors import WorkerError
from isobatch_worker.models.progress import Step, show_steps
from isobatch_worker.plan_cache import kept_plans
from isobatch_worker.plan_view import PlanView, table, view_operator
from isobatch_worker.report import Report, read_report
from isobatch_worker.shapes import FORMS, parse_shape
from isobatch_worker.supervisor import kill_descendants, start
from isobatch_worker.wheel_tag import correct_wheel_tag

_EXAMPLE = f"""example:
  isobatch certify builtin://smollm2-135m
  isobatch certify file:///models/llama --json -- --max-model-len 8192
  isobatch certify --shapes linear=4096x14336 attention=32/8x128

shapes: {"; ".join(FORMS.values())}

exit code: 0 certified, 1 refused, 2 wrong use. The plan is kept: a strict worker of the same model
and vLLM arguments finds it, proves it again on a sample and starts sooner.
"""
_POLL_SECONDS = 0.2
_LOG_LINES = 15  # shown of a vLLM that ended before it was certified


class _EngineEnded(Exception):
    """vLLM ended before certification did; the message holds the end of its log."""


def certify(argv: list[str]) -> int:
    """Certify a model, or shapes alone, and print what was found."""
    parser = _parser()
    options = parser.parse_args(argv)
    if (options.model is None) == (options.shapes is None):
        parser.error("name a MODEL, or --shapes, and not both")
    if options.shapes is not None and options.vllm_args:
        parser.error("vLLM's arguments go with a MODEL; --shapes takes none")
    try:
        with show_steps() as step:
            if options.shapes is None:
                view = _certify_model(options, step)
            else:
                # vLLM logs to stdout otherwise, which is the answer's; read when it is imported.
                os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
                from isobatch_worker.certify_shapes import certify_shapes  # torch, for this alone

                asked = [parse_shape(text) for text in options.shapes]
                view = certify_shapes(asked, options.dtype, step)
    except (WorkerError, WrongUse) as refusal:
        return _fail(str(refusal), 2)
    except (CertificationRefused, _EngineEnded) as refusal:
        if options.output == "json":
            sys.stdout.write(json.dumps({"state": "refused", "reason": str(refusal)}) + "\n")
        return _fail(str(refusal), 1)
    if options.output == "json":
        sys.stdout.write(view.model_dump_json(indent=2, by_alias=True) + "\n")
    else:
        sys.stdout.write(table(view))
    return 0


def _fail(reason: str, code: int) -> int:
    print(f"isobatch certify: {reason}", file=sys.stderr)  # noqa: T201  # a command speaks
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="isobatch certify",
        description="Prove on this machine which schedules have the strict pool's bits; print "
        "trees, candidates, refusals and the choice for each row count; keep the plan.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="builtin:// file:// hf://")
    parser.add_argument("--digest", help="sha256:...; other weights are refused")
    parser.add_argument("--shapes", nargs="+", metavar="SHAPE", help="operators without a model")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="of --shapes"
    )
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table", help="format")
    parser.add_argument("--json", dest="output", action="store_const", const="json", help="-o json")
    parser.add_argument("vllm_args", nargs="*", metavar="VLLM-ARGS", help="after --, vLLM's own")
    return parser


def _certify_model(options: argparse.Namespace, step: Step) -> PlanView:
    """What a strict worker of the model proves before its first request; it is then ended."""
    correct_wheel_tag()
    with tempfile.TemporaryDirectory(prefix="isobatch-certify-") as folder:
        settings = settings_of(
            options,
            PoolName.STRICT,
            served_name=None,
            address=("127.0.0.1", 0),  # any free port: nobody is to call
            folder=Path(folder),
        )
        launch = compose(settings, os.environ)
        report = _outcome(launch, Path(settings.report_path), Path(folder) / "vllm.log", step)
    if not isinstance(report, Certified):
        raise CertificationRefused(report.reason)
    plans = (plan for _, plan in kept_plans(plans_dir(Path(settings.cache_folder))))
    plan = next(plan for plan in plans if plan.fingerprint == report.fingerprint)
    return PlanView(
        fingerprint=report.fingerprint,
        device=report.device,
        from_cache=report.from_cache,
        seconds=report.certification_seconds,
        operators=tuple(view_operator(operator) for operator in plan.operators),
    )


def _outcome(launch: Launch, path: Path, log: Path, step: Step) -> Report:
    """The report at `path` once it is final; nothing of `launch` runs on afterwards."""
    with log.open("w") as output, _ended_by_signals():
        try:
            child = start(launch, output)
            return _wait(child, path, log, step)
        finally:
            kill_descendants()


def _wait(child: subprocess.Popen[bytes], path: Path, log: Path, step: Step) -> Report:
    while True:
        has_ended = child.poll() is not None  # before the report is read: it may be the last word
        report = read_report(path)
        if isinstance(report, Certified) or report.state == "refused":
            return report
        if has_ended:
            end = "\n  ".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])
            raise _EngineEnded(f"vLLM ended with code {child.returncode} before that:\n  {end}")
        step(report.reason)
        time.sleep(_POLL_SECONDS)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM unwinds as Ctrl-C does, so that vLLM is not left behind."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
