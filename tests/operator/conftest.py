"""Services in a few lines, for the planner's tests and for `up`."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from isobatch_contracts.resource import InferenceService

MakeManifest = Callable[..., dict[str, Any]]
MakeService = Callable[..., InferenceService]
FAKES = Path(__file__).parent / "fakes"


@pytest.fixture(scope="session")
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Wait until something holds, within a bound that only a failure reaches."""

    def wait(is_true: Callable[[], bool], seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while not is_true():
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.02)

    return wait


@pytest.fixture(scope="session")
def make_manifest() -> MakeManifest:
    """A manifest; `None` replicas: the service lacks the pool."""

    def make(  # noqa: PLR0917  # called by name
        strict: int | None = 1,
        throughput: int | None = 1,
        strict_args: tuple[str, ...] = (),
        throughput_args: tuple[str, ...] = (),
        name: str = "chat",
        strategy: str = "Canary",
        steps: tuple[dict[str, Any], ...] = (),
        **model: str,
    ) -> dict[str, Any]:
        pools = {
            pool: {"replicas": replicas, "runtime": {"args": list(args)}}
            for pool, replicas, args in (
                ("strict", strict, strict_args),
                ("throughput", throughput, throughput_args),
            )
            if replicas is not None
        }
        return {
            "apiVersion": "serving.isobatch.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": name},
            "spec": {
                "model": {"uri": "builtin://smollm2-135m", **model},
                "pools": pools,
                "rollout": {"strategy": strategy, "steps": list(steps)},
            },
        }

    return make


@pytest.fixture(scope="session")
def make_service(make_manifest: MakeManifest) -> MakeService:
    def make(**options: Any) -> InferenceService:
        return InferenceService.model_validate(make_manifest(**options))

    return make


@pytest.fixture
def write_manifest(tmp_path: Path, make_manifest: MakeManifest) -> Callable[..., Path]:
    """A manifest file; written again, it is replaced at once, as an editor does."""

    def write(**options: Any) -> Path:
        path = tmp_path / "service.yaml"
        scratch = tmp_path / ".service.yaml.new"
        scratch.write_text(yaml.safe_dump(make_manifest(**options)))
        return scratch.replace(path)

    return write
