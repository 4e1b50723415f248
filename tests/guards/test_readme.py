"""The README's list of modules is what their docstrings say, its table of refusals what the worker
refuses: `--update-golden` writes them anew."""

import ast
from collections.abc import Callable
from pathlib import Path

from isobatch_worker.engine_config import REFUSED, On

from tests.guards.repository import ROOT, SOURCE_ROOTS, modules

Check = Callable[[Path, str], None]


def listing() -> str:
    """One line per module, below its package: its docstring's first paragraph."""
    lines: list[str] = []
    for path, tree in modules(*SOURCE_ROOTS):
        if path.name == "__init__.py":
            continue
        package, module = path.parts[1], "/".join(path.parts[2:]).removesuffix(".py")
        heading = f"\n**{path.parts[0]}/{package}**\n"
        if heading not in lines:
            lines.append(heading)
        said = (ast.get_docstring(tree) or "").split("\n\n")[0].replace("\n", " ")
        lines.append(f"- `{module}`: {said}")
    return "\n".join(lines) + "\n\n"


def test_every_module_says_in_its_first_line_what_it_is() -> None:
    assert [line for line in listing().splitlines() if line.endswith(": ")] == []


def refusals() -> str:
    """A row for each thing that strict refuses."""
    rows = ["| Refused in strict | Seen in | Why |", "| --- | --- | --- |"]
    for refused in REFUSED:
        seen = [f"`{option}`" for option in refused.options]
        seen += ["the configuration"] if refused.check else []
        where = ", ".join(seen) or "the loaded model or installation"
        only = "" if refused.on is On.BOTH else f" ({refused.on.value})"
        rows.append(f"| {refused.name}{only} | {where} | {refused.why} |")
    return "\n".join(rows) + "\n"


def check_section(name: str, text: str, check_golden: Check) -> None:
    readme = ROOT / "README.md"
    start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
    before, _, rest = readme.read_text().partition(start)
    _, _, after = rest.partition(end)

    check_golden(readme, f"{before}{start}{text}{end}{after}")


def test_the_readme_lists_every_module(check_golden: Check) -> None:
    check_section("modules", listing(), check_golden)


def test_the_readme_shows_all_that_strict_refuses(check_golden: Check) -> None:
    check_section("refusals", refusals(), check_golden)
