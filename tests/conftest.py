"""Options of the whole suite: `--full` for the rows CI only samples, `--update-golden` for files
that are generated and diffed; figures that are reported at the end (and, with --full, kept); and,
where CI=true, no skip that hides a missing tool."""

import json
import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.benchmarks.machine import RESULTS, describe

# A deadline measures the machine's other work, not the code.
settings.register_profile("isobatch", settings.default, deadline=None)
settings.load_profile("isobatch")

NOT_FULL = "runs with --full"
# What CI's machines cannot have; any other skip means that .ci/run failed to install something.
ALLOWED_IN_CI = (NOT_FULL, "needs a GPU", "needs 2 GPUs")

pytest_plugins = ["tests.cluster.fixtures"]
FIGURE = "figure "  # begins the names of properties that are shown
OUTCOMES = ("passed", "failed", "error", "skipped")

CheckGolden = Callable[[Path, str], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("isobatch")
    group.addoption("--full", action="store_true", help="run the tests marked `full` too")
    group.addoption("--update-golden", action="store_true", help="rewrite the golden files")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    for item in items:
        if item.get_closest_marker("full"):
            item.add_marker(pytest.mark.skip(reason=NOT_FULL))


@pytest.fixture
def report_figure(record_property: Callable[[str, object], None]) -> Callable[[str, object], None]:
    """(name, value) of something measured that no test asserts: shown at the end of the run."""
    return lambda name, value: record_property(f"{FIGURE}{name}", value)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    passed = [r for r in terminalreporter.stats.get("passed", []) if r.when == "call"]
    figures = {
        name.removeprefix(FIGURE): value
        for report in passed
        for name, value in report.user_properties
        if name.startswith(FIGURE)
    }
    if figures:
        terminalreporter.section("figures")
        for name, value in figures.items():
            terminalreporter.line(f"{name}: {value}")
    seconds = {r.nodeid: round(r.duration, 1) for r in passed if "tests/e2e" in r.nodeid}
    is_whole = not config.option.keyword and {Path(a).name for a in config.args} <= {"tests", "e2e"}
    if config.getoption("--full") and seconds and is_whole:
        counts = {k: len(v) for k, v in terminalreporter.stats.items() if k in OUTCOMES}
        kept = {"machine": describe(), "outcomes": counts, "figures": figures, "seconds": seconds}
        (RESULTS / "full.json").write_text(json.dumps(kept, indent=1) + "\n")


def _refuse_skip_in_ci(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip whose reason CI does not allow into a failure."""
    if os.environ.get("CI") != "true" or not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if not reason.removeprefix("Skipped: ").startswith(ALLOWED_IN_CI):
        report.outcome = "failed"
        report.longrepr = f"skipped where CI=true, so nothing was tested: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _refuse_skip_in_ci(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _refuse_skip_in_ci(report)
    return report


@pytest.fixture
def check_golden(pytestconfig: pytest.Config) -> CheckGolden:
    """Compare a text with its golden file, or rewrite the file with `--update-golden`."""

    def check(path: Path, text: str) -> None:
        if pytestconfig.getoption("--update-golden"):
            path.write_text(text)
        assert path.read_text() == text, f"{path.name} differs: see it, then --update-golden"

    return check
