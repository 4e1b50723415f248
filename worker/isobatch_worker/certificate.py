"""Performs: the certification of one engine from loaded weights to certificate, on any device.

Runs in the engine. A refusal is reported, not raised: the API server then answers 503 with the
reason on every path, which says more than a worker that does not start.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from isobatch_contracts.numerics import Certified, NotCertified, OperatorSummary
from isobatch_kernels.certification import CertificationRefused, Operator, certify
from isobatch_kernels.plan import Arithmetic, OperatorPlan, Plan, operator_plan

from isobatch_worker.environment import read_versions
from isobatch_worker.plan_cache import Key, load_plan, plan_file, save_plan
from isobatch_worker.probe import (
    HasReference,
    RunnerKind,
    compare_batches,
    probe_digest,
    reference_logits,
)
from isobatch_worker.report import report_path, write_report

MODEL_DIGEST = "ISOBATCH_MODEL_DIGEST"
SETTINGS = "ISOBATCH_SETTINGS"
PLANS_FOLDER = "ISOBATCH_PLANS"

SEED = 20260101
"""Of the inputs drawn; any constant will do, a constant keeps proofs repeatable."""

log = logging.getLogger("vllm.isobatch")


@dataclass(frozen=True, slots=True)
class Subject:
    """One operator to certify; `reprove` raises `CertificationRefused` if a kept proof fails."""

    key: Key
    prove: Callable[[], OperatorPlan]
    reprove: Callable[[OperatorPlan], None] = lambda _: None


def subject_of(operator: Operator) -> Subject:
    """`operator`, certified as `certify` does."""
    key = (operator.name, operator.shape, operator.tree)
    return Subject(key, lambda: operator_plan(certify(operator)))


def lone_subject(operator: Operator) -> Subject:
    """`operator`, which has one kernel and nothing to fall back on: certified where it serves all.

    Its proof raises `CertificationRefused` where the kernel is refused at any row count.
    """
    key = (operator.name, operator.shape, operator.tree)
    return Subject(key, partial(_proved_at_every_count, operator))


def _proved_at_every_count(operator: Operator) -> OperatorPlan:
    proof = certify(operator)
    if proof.refused:
        name, reason = next(iter(proof.refused.items()))
        raise CertificationRefused(f"{operator.name} {operator.shape}: {name}: {reason}")
    return operator_plan(proof)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model whose operators are certified and installed; the whole is still to be asked."""

    plan: Plan
    path: Path
    from_cache: bool
    serving: list[HasReference]
    kind: RunnerKind
    seconds: float


class Certification:
    """The certification of one engine.

    `prepare` once the weights are loaded, `confirm` once the KV cache is there; what is refused in
    the first is not confirmed in the second.
    """

    def __init__(self, prepare: Callable[[Any], Prepared]) -> None:
        """`prepare` certifies the operators of a runner's model and installs what was admitted."""
        self._prepare = prepare
        self._pending: Prepared | None = None

    def prepare(self, runner: Any) -> None:
        """Certify the operators of `runner`'s model and install what was admitted."""
        with _refusals_reported():
            self._pending = self._prepare(runner)

    def confirm(self, runner: Any) -> None:
        """Ask whether the whole model holds, and report the certificate."""
        prepared, self._pending = self._pending, None
        if prepared is None:
            return
        with _refusals_reported():
            certificate = _confirm(runner, prepared)
            write_report(report_path(), certificate)
            log.info(
                "certified %d operators in %.1f s (cached: %s): %s",
                len(certificate.operators),
                certificate.certification_seconds,
                certificate.from_cache,
                certificate.fingerprint,
            )


@contextmanager
def _refusals_reported() -> Iterator[None]:
    try:
        yield
    except CertificationRefused as refusal:
        report_refusal(refusal)


def report_refusal(refusal: CertificationRefused) -> None:
    """Say that this worker may not serve strict requests, and why."""
    log.error("strict is refused: %s", refusal)
    write_report(report_path(), NotCertified(state="refused", reason=str(refusal)))


def wanted_plan(arithmetic: Arithmetic, sampler: str, dtype: str) -> Plan:
    """The plan of this worker without anything proved."""
    return Plan(
        model_digest=os.environ[MODEL_DIGEST],
        settings=os.environ[SETTINGS],
        arithmetic=arithmetic,
        versions=read_versions(),
        sampler=sampler,
        dtype=dtype,
        operators=(),
    )


def prove(subjects: Sequence[Subject], wanted: Plan) -> tuple[Plan, Path, bool]:
    """(plan that proves `subjects`, its file, whether it was kept), progress being reported.

    A kept plan is not trusted: what its operators can prove again on a sample they do.
    """
    path = plan_file(Path(os.environ[PLANS_FOLDER]), wanted)
    kept = load_plan(path, wanted, {s.key for s in subjects})
    if kept is not None:
        _reprove(subjects, kept, path)
        return kept, path, True

    def tell(step: str) -> None:
        write_report(report_path(), NotCertified(state="certifying", reason=step))
        log.info("%s", step)

    return wanted.model_copy(update={"operators": prove_all(subjects, tell)}), path, False


def prove_all(subjects: Sequence[Subject], tell: Callable[[str], None]) -> tuple[OperatorPlan, ...]:
    """Prove `subjects` one after another; `tell` hears which. Raises `CertificationRefused`."""
    proofs = []
    for done, subject in enumerate(subjects):
        name, shape, _ = subject.key
        tell(f"certifying {name} {shape} ({done + 1} of {len(subjects)})")
        proofs.append(subject.prove())
    return tuple(proofs)


def _reprove(subjects: Sequence[Subject], kept: Plan, path: Path) -> None:
    plans = {(o.operator, o.shape, o.tree): o for o in kept.operators}
    try:
        for subject in subjects:
            subject.reprove(plans[subject.key])
    except CertificationRefused:
        path.unlink(missing_ok=True)  # the next start certifies anew
        raise


def _confirm(runner: Any, prepared: Prepared) -> Certified:
    started = time.monotonic()
    logits = reference_logits(prepared.kind, runner, prepared.serving)
    digest = probe_digest(logits)
    plan = prepared.plan
    if not prepared.from_cache:
        compare_batches(prepared.kind, runner, logits)
        plan = plan.model_copy(update={"probe": digest})
        save_plan(prepared.path, plan)
    elif plan.probe != digest:
        prepared.path.unlink(missing_ok=True)
        raise CertificationRefused(
            "the probe prompts no longer have the logits that the kept plan was made with; the "
            "plan is dropped: start again to certify anew"
        )
    seconds = prepared.seconds + time.monotonic() - started
    vocabulary = runner.model_config.get_vocab_size()
    return _summary(plan, vocabulary, from_cache=prepared.from_cache, seconds=seconds)


def _summary(plan: Plan, vocabulary: int, *, from_cache: bool, seconds: float) -> Certified:
    return Certified(
        fingerprint=plan.fingerprint,
        model_digest=plan.model_digest,
        device=plan.arithmetic.device,
        versions=plan.versions,
        operators=tuple(
            OperatorSummary(
                operator=o.operator,
                shape=o.shape,
                reference=o.tree,
                admitted=tuple(name for name, at in o.admitted.items() if at),
                refused=tuple(f"{name}: {why}" for name, why in o.refused.items()),
                comparisons=o.comparisons,
            )
            for o in plan.operators
        ),
        vocabulary=vocabulary,
        from_cache=from_cache,
        certification_seconds=round(seconds, 3),
    )
