import dataclasses

import pytest
from isobatch_worker import seams


def test_the_installed_vllm_is_the_one_that_was_read() -> None:
    seams.check()


def test_a_seam_whose_source_changed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *rest = seams.SEAMS
    changed = dataclasses.replace(first, digest="0" * 16)
    monkeypatch.setattr(seams, "SEAMS", (changed, *rest))

    with pytest.raises(seams.SeamsChanged, match=first.name):
        seams.check()


def test_another_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams, "vllm_version", lambda: "0.27.0")

    with pytest.raises(seams.SeamsChanged, match=r"needs vLLM 0\.26\.0; 0\.27\.0 is installed"):
        seams.check()
