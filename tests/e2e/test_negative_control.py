"""A strict pool whose numerics are broken on purpose must not answer; standard must."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from isobatch_worker.cache import default_cache_dir

pytestmark = pytest.mark.model

# Loaded by Python at start in the strict pool's processes: a linear whose every row feels the
# whole batch, so that no candidate is right and the reference fails its own check.
PLANTED = """
import os
if os.environ.get("ISOBATCH_POOL") == "strict":
    from isobatch_worker import seams
    honest = seams.library_linear
    def planted(weight):
        linear = honest(weight)
        return lambda x, bias: linear(x, bias) + x.nan_to_num(0, 0, 0).mean()
    seams.library_linear = planted
"""
MANIFEST = """
apiVersion: serving.isobatch.dev/v1alpha1
kind: InferenceService
metadata: {{name: planted}}
spec:
  model: {{name: smollm2, uri: "builtin://smollm2-135m"}}
  pools:
    strict: {{runtime: {{env: [{{name: PYTHONPATH, value: "{folder}"}}]}}}}
    throughput: {{}}
"""


@pytest.mark.usefixtures("service")  # it has filled the cache
def test_a_wrong_linear_is_refused_and_only_strict_suffers(tmp_path: Path, service_of: Any) -> None:
    (tmp_path / "sitecustomize.py").write_text(PLANTED)
    manifest = tmp_path / "service.yaml"
    manifest.write_text(MANIFEST.format(folder=tmp_path))
    # Plans of its own: one kept from an honest start would not be proved again.
    cache = tmp_path / "cache"
    cache.mkdir()
    for kept in ("models", "bytecode"):
        (cache / kept).symlink_to(default_cache_dir() / kept)
    service = service_of("-f", str(manifest), ISOBATCH_CACHE_DIR=str(cache))

    def ask(tier: str) -> httpx.Response:
        return httpx.post(
            f"{service.url}/v1/completions",
            headers={"X-Consistency-Tier": tier},
            json={"model": "smollm2", "prompt": "x", "max_tokens": 2},
            timeout=60,
        )

    assert service.started.returncode == 1
    assert "itself not independent of the batch" in service.started.stderr + service.started.stdout
    for tier in ("strict", "verified"):
        refusal = ask(tier)
        assert refusal.status_code == 503
        assert refusal.json()["error"]["code"] == "strict_unavailable"
        assert int(refusal.headers["retry-after"]) > 0
    answer = ask("standard")
    assert answer.status_code == 200
    assert answer.headers["x-served-by"].startswith("throughput/")
