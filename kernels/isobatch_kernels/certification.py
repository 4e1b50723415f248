"""Decides which schedules of an operator may serve: those with the reference's bits, proved here.

Device-neutral. An operator brings its reference, its candidates and the cases to try; a schedule is
admitted for a *domain* (a row count, say) when its bits equal the reference's on every case of that
domain. Shape -> candidates -> proof -> plan -> fingerprint: `plan.py` takes the proofs from here.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby

import torch

from isobatch_kernels.bits import first_difference, same_bits

Tensors = tuple[torch.Tensor, ...]
Progress = Callable[[str, int, int], None]
"""(what is being proved, operators done, operators in all)."""


class CertificationRefused(Exception):
    """An operator has no schedule that may serve; the message names it and the counterexample."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """One way to compute an operator. `run` takes and returns tensors; it may alter its inputs."""

    name: str
    run: Callable[..., Tensors]


@dataclass(frozen=True, slots=True)
class Case:
    """Inputs with the reference's answer. `domain` is what equal bits on it help to admit."""

    domain: int
    label: str
    inputs: Tensors
    expected: Tensors


@dataclass(frozen=True, slots=True)
class Operator:
    """What is certified: `name` and `shape` identify it, `tree` names the reference's arithmetic.

    `candidates` stand in order of preference; `self_check` says why the reference itself does
    depend on the batch, or None.
    """

    name: str
    shape: str
    tree: str
    candidates: tuple[Schedule, ...]
    cases: Callable[[], Iterator[Case]]
    self_check: Callable[[], str | None]


@dataclass(frozen=True, slots=True)
class Proof:
    """What was found of one operator. `admitted` maps schedule names to the domains proved."""

    operator: str
    shape: str
    tree: str
    admitted: dict[str, frozenset[int]]
    refused: dict[str, str]  # schedule -> first counterexample
    comparisons: int


def prove_groups(
    operator: Operator,
    groups: Iterable[tuple[Schedule, ...]],
    serves: Callable[[str, int], bool],
) -> Proof:
    """Certify each of `groups` of candidates as if it stood alone, for the domains it `serves`.

    `certify` stops at the first candidate admitted for a domain, the most liked; here that holds
    within a group. The reference is checked and the cases are made once, held together in memory.
    Raises `CertificationRefused` as `certify` does.
    """
    proof = certify(replace(operator, candidates=(), cases=lambda: iter(())))
    cases = tuple(operator.cases())
    for group in groups:
        own = tuple(c for c in cases if any(serves(s.name, c.domain) for s in group))
        if own:
            alone = replace(
                operator, candidates=group, cases=partial(iter, own), self_check=lambda: None
            )
            proof = _join(proof, certify(alone))
    return proof


def _join(left: Proof, right: Proof) -> Proof:
    return replace(
        left,
        admitted=left.admitted | right.admitted,
        refused=left.refused | right.refused,
        comparisons=left.comparisons + right.comparisons,
    )


@dataclass(slots=True)
class _Tally:
    admitted: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    counterexamples: dict[str, str] = field(default_factory=dict)
    comparisons: int = 0


def certify(operator: Operator) -> Proof:
    """Prove the candidates of `operator` against its reference.

    A candidate is tried for the domains where no better one is admitted: what would never be
    chosen needs no proof, and a large LM head would take a minute otherwise.
    Raises `CertificationRefused` if the reference does not pass its own check: then nothing is
    known to compare with, and the operator must not serve.
    """
    reason = operator.self_check()
    if reason is not None:
        raise CertificationRefused(
            f"{operator.name} {operator.shape}: the reference ({operator.tree}) is itself not "
            f"independent of the batch: {reason}"
        )
    tally = _Tally()
    for domain, cases in groupby(operator.cases(), key=lambda case: case.domain):
        _prove(operator.candidates, domain, tuple(cases), tally)
    return Proof(
        operator=operator.name,
        shape=operator.shape,
        tree=operator.tree,
        admitted={c.name: frozenset(tally.admitted[c.name]) for c in operator.candidates},
        refused=tally.counterexamples,
        comparisons=tally.comparisons,
    )


def _prove(
    candidates: tuple[Schedule, ...], domain: int, cases: tuple[Case, ...], tally: _Tally
) -> None:
    """Admit for `domain` the first candidate that has the reference's bits on all of `cases`."""
    for candidate in candidates:
        for case in cases:
            tally.comparisons += 1
            reason = _disagreement(candidate, case)
            if reason is not None:
                tally.counterexamples.setdefault(candidate.name, f"{case.label}: {reason}")
                break
        else:
            tally.admitted[candidate.name].add(domain)
            return


def _disagreement(candidate: Schedule, case: Case) -> str | None:
    try:
        got = candidate.run(*(x.clone() for x in case.inputs))
    except (RuntimeError, ValueError, TypeError, IndexError) as exc:
        # A candidate that cannot run this shape is refused for it, not fatal.
        return f"raised {type(exc).__name__}: {exc}"
    if len(got) != len(case.expected):
        return f"returned {len(got)} tensors, the reference {len(case.expected)}"
    for position, (mine, wanted) in enumerate(zip(got, case.expected, strict=True)):
        if mine.shape != wanted.shape or mine.dtype != wanted.dtype:
            return f"output {position} is {mine.dtype}{tuple(mine.shape)}, not the reference's"
        if not same_bits(mine, wanted):
            return f"output {position} differs first at {first_difference(mine, wanted)}"
    return None
