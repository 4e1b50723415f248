"""The README's list of modules is what their docstrings say: `--update-golden` writes it anew."""

import ast
from collections.abc import Callable
from pathlib import Path

from tests.guards.repository import ROOT, SOURCE_ROOTS, modules

START, END = "<!-- modules -->\n", "<!-- /modules -->\n"


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


def test_the_readme_lists_every_module(check_golden: Callable[[Path, str], None]) -> None:
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text().partition(START)
    _, _, after = rest.partition(END)

    check_golden(readme, f"{before}{START}{listing()}{END}{after}")
