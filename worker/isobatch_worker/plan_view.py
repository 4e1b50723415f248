"""Decides what people are shown of a plan: schedules, refusals, choices; says it in words too."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from isobatch_contracts.base import Document
from isobatch_contracts.fields import Digest
from isobatch_kernels.plan import OperatorPlan, Plan

BLOCKS = "reference blocks"
"""What serves a row count at which no schedule was proved."""


class ScheduleView(Document):
    """One candidate: the row counts (0: any) it was admitted at, and its first counterexample."""

    name: str
    admitted: tuple[int, ...]
    refused: str | None


class ChoiceView(Document):
    """Which schedule serves a range of row counts, `first` to `last`."""

    first: int
    last: int
    schedule: str


class OperatorView(Document):
    """One operator shape of a plan."""

    operator: str
    shape: str
    tree: str
    comparisons: int
    candidates: tuple[ScheduleView, ...]
    choice: tuple[ChoiceView, ...]


class PlanView(Document):
    """What `isobatch certify` prints: fingerprint None where no model was asked."""

    fingerprint: Digest | None
    device: str
    from_cache: bool
    seconds: float
    operators: tuple[OperatorView, ...]


def view_operator(plan: OperatorPlan) -> OperatorView:
    """`plan` as it is shown."""
    names = dict.fromkeys((*plan.admitted, *plan.refused))
    return OperatorView(
        operator=plan.operator,
        shape=plan.shape,
        tree=plan.tree,
        comparisons=plan.comparisons,
        candidates=tuple(
            ScheduleView(
                name=name,
                admitted=plan.admitted.get(name, ()),
                refused=plan.refused.get(name),
            )
            for name in names
        ),
        choice=tuple(_choice(plan)),
    )


def _choice(plan: OperatorPlan) -> Iterator[ChoiceView]:
    """Ranges of proved row counts with one schedule; where times decided, those; else by liking."""
    if plan.exact or plan.spans:
        yield from _ranges(plan.exact)
        start = 1
        for end, name in sorted(plan.spans.items()):
            yield ChoiceView(first=start, last=end, schedule=f"{name} (rows not named above)")
            start = end + 1
        return
    liked: dict[int, str] = {}
    for name, counts in plan.admitted.items():
        for count in counts:
            liked.setdefault(count, name)
    yield from _ranges(liked)


def _ranges(by_rows: Mapping[int, str]) -> Iterator[ChoiceView]:
    """Neighbours in the order of proved counts that have one schedule, as one range."""
    run: list[int] = []
    for rows, name in sorted(by_rows.items()):
        if run and by_rows[run[0]] != name:
            yield ChoiceView(first=run[0], last=run[-1], schedule=by_rows[run[0]])
            run = []
        run.append(rows)
    if run:
        yield ChoiceView(first=run[0], last=run[-1], schedule=by_rows[run[0]])


def table(view: PlanView) -> str:
    """`view` as text: an operator a paragraph, its tree, candidates, refusals and choice."""
    lines = [f"fingerprint  {view.fingerprint}"] if view.fingerprint else []
    kept = " (kept plan, proved again on a sample)" if view.from_cache else ""
    lines += [f"device       {view.device}", f"took         {view.seconds:.1f} s{kept}"]
    for operator in view.operators:
        lines += ["", *_paragraph(operator)]
    return "\n".join(lines) + "\n"


def _paragraph(operator: OperatorView) -> Iterator[str]:
    admitted = [c.name for c in operator.candidates if c.admitted]
    yield f"{operator.operator}  {operator.shape}"
    yield f"  tree        {operator.tree}"
    yield (
        f"  candidates  {len(operator.candidates)}, admitted {len(admitted)}: "
        f"{', '.join(admitted) or 'none, ' + BLOCKS + ' serve'}; "
        f"{operator.comparisons} comparisons"
    )
    untried = [c.name for c in operator.candidates if not c.admitted and c.refused is None]
    if untried:
        yield f"  not tried   {', '.join(untried)}: a candidate liked better was admitted"
    for candidate in operator.candidates:
        if candidate.refused is not None:
            where = "elsewhere admitted" if candidate.admitted else "nowhere admitted"
            yield f"  refused     {candidate.name} ({where}): {candidate.refused}"
    for choice in operator.choice:
        yield f"  M {_rows(choice):<9} {choice.schedule}"


def _rows(choice: ChoiceView) -> str:
    if choice.last == 0:
        return "any"
    return str(choice.first) if choice.first == choice.last else f"{choice.first}..{choice.last}"


@dataclass(frozen=True, slots=True)
class Fixed:
    """What fixes the bits of one fingerprint, as far as its source tells."""

    fingerprint: str
    source: str
    model_digest: str
    device: str
    versions: Mapping[str, str]
    trees: tuple[tuple[str, str, str], ...]  # (operator, shape, tree)
    plan: Plan | None = None  # None: only a replica's summary is known


def explain(fixed: Fixed) -> str:
    """`fixed` in words: two replicas that agree in all of it must give one output."""
    lines = [
        fixed.fingerprint,
        f"known from {fixed.source}",
        "",
        "The bits of an answer are fixed by the request and by all of the following, no less:",
        f"  model       {fixed.model_digest}: weights, config, generation config, tokenizer",
        f"  computes    {fixed.device}",
    ]
    if fixed.plan is None:
        lines.append(
            "  and         instruction set, threads, sampler, arguments and probe, which a replica "
            "does not tell: run this where its plan is kept"
        )
    else:
        lines += _of_plan(fixed.plan)
    versions = ", ".join(f"{name} {version}" for name, version in sorted(fixed.versions.items()))
    lines += [f"  versions    {versions}", "  trees       the order in which each operator adds:"]
    lines += [f"    {operator} {shape}: {_in_words(tree)}" for operator, shape, tree in fixed.trees]
    lines += [
        "",
        "Not fixed by it, and proved not to reach the bits: which admitted schedule runs, the "
        "batch, the chunks of a prefill, the prefix cache, preemption, the replica.",
    ]
    return "\n".join(lines) + "\n"


def _of_plan(plan: Plan) -> list[str]:
    threads = f", {plan.arithmetic.threads} threads" if plan.arithmetic.threads else ""
    return [
        f"  arithmetic  {plan.arithmetic.isa}{threads}, values in {plan.dtype}",
        f"  sampler     {plan.sampler}: noise of (seed, position) alone",
        f"  settings    {plan.settings}: vLLM's arguments that can reach an answer",
        f"  probe       {plan.probe or 'none'}: logits of fixed prompts on the references",
    ]


def _in_words(tree: str) -> str:
    """`tree` with what its name means, where it is one of ours."""
    kind, _, rest = tree.partition("-k")
    if kind == "plain" and rest.isdigit():
        return f"{tree}, products in order of K, fused groups of {rest} in one chain"
    if kind.startswith("chunk") and rest.isdigit():
        return f"{tree}, chunks of {kind.removeprefix('chunk')} products, their sums in order"
    if tree.startswith("blocks-of-"):
        return f"{tree}, the library's on blocks of exactly {tree.rpartition('-')[2]} rows"
    return tree
