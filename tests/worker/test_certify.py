"""`isobatch certify`, by its own command line, on shapes and on what it refuses."""

import json
import subprocess
import sys

import pytest
from isobatch_kernels.plan import OperatorPlan
from isobatch_worker.certify import certify
from isobatch_worker.errors import ShapeError
from isobatch_worker.plan_view import PlanView, table, view_operator
from isobatch_worker.shapes import ActivationOf, Asked, AttentionOf, LinearOf, NormOf, parse_shape

PLAN = OperatorPlan(
    operator="linear",
    shape="8x32 bfloat16",
    tree="plain-k16",
    admitted={"a": (1, 2, 4), "b": (1, 8), "c": ()},
    refused={"b": "2 rows: differs", "d": "raised ValueError"},
    comparisons=9,
)


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("linear=4096x14336", LinearOf(4096, 14336, has_bias=False)),
        ("linear=8x3+bias", LinearOf(8, 3, has_bias=True)),
        ("norm=576", NormOf(576)),
        ("activation=1", ActivationOf(1)),
        ("attention=32/8x128", AttentionOf(32, 8, 128)),
    ],
)
def test_a_shape_is_read(text: str, shape: Asked) -> None:
    assert parse_shape(text) == shape


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("linear=4096", "NxK"),
        ("linear=0x4", "NxK"),
        ("attention=32x128", "HEADS/KV_HEADS"),
        ("attention=9/2x64", "no multiple"),
        ("norm=-1", "WIDTH"),
        ("conv=3", "linear=NxK"),
        ("", "linear=NxK"),
    ],
)
def test_what_is_no_shape_is_told_what_was_expected(text: str, said: str) -> None:
    with pytest.raises(ShapeError, match=said):
        parse_shape(text)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "name a MODEL, or --shapes"),
        (["builtin://smollm2-135m", "--shapes", "norm=8"], "not both"),
    ],
    ids=["nothing", "both"],
)
def test_wrong_use_ends_with_2(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        certify(argv)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--shapes", "norm=x"], "norm=WIDTH"),
        (["builtin://nothing"], "is unknown"),
        (["builtin://smollm2-135m", "--", "--quantization", "fp8"], "quantized linears"),
    ],
    ids=["shape", "model", "argument"],
)
def test_what_cannot_be_tried_ends_with_2_and_the_reason(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert certify(argv) == 2
    assert said in capsys.readouterr().err


def test_shapes_are_certified_on_this_machine_and_json_alone_is_printed() -> None:
    shapes = ["linear=8x64", "norm=32", "activation=16"]
    command = [sys.executable, "-m", "isobatch_cli", "certify", "--json", "--shapes", *shapes]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    names = ["linear", "rms-norm", "add-rms-norm", "SiluAndMul"]
    assert [operator["operator"] for operator in said["operators"]] == names
    assert all(operator["choice"] for operator in said["operators"])
    assert "certifying linear 8x64" in done.stderr


def test_a_table_names_candidates_refusals_and_the_choice_by_rows() -> None:
    view = view_operator(PLAN)
    choice = [(one.first, one.last, one.schedule) for one in view.choice]
    assert choice == [(1, 4, "a"), (8, 8, "b")]

    text = table(
        PlanView(fingerprint=None, device="d", from_cache=False, seconds=1, operators=(view,))
    )
    assert "candidates  4, admitted 2: a, b; 9 comparisons" in text
    assert "not tried   c" in text
    assert "b (elsewhere admitted): 2 rows: differs" in text
    assert "d (nowhere admitted): raised ValueError" in text


def test_where_times_decided_their_choice_is_shown() -> None:
    timed = PLAN.model_copy(update={"exact": {1: "b", 2: "a"}, "spans": {16: "a", 64: "c"}})

    shown = [(one.first, one.last, one.schedule) for one in view_operator(timed).choice]
    other = "(rows not named above)"
    assert shown == [(1, 1, "b"), (2, 2, "a"), (1, 16, f"a {other}"), (17, 64, f"c {other}")]
