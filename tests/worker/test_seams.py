import dataclasses

import pytest
from isobatch_worker import seams
from isobatch_worker.seam_list import ON_CPU, ON_CUDA, Seam


@pytest.mark.parametrize("of", [ON_CPU, ON_CUDA], ids=["cpu", "cuda"])
def test_the_installed_vllm_is_the_one_that_was_read(of: tuple[Seam, ...]) -> None:
    seams.check(of)


def test_a_seam_whose_source_changed_is_named() -> None:
    first, *rest = ON_CPU
    changed = dataclasses.replace(first, digest="0" * 16)

    with pytest.raises(seams.SeamsChanged, match=first.name):
        seams.check((changed, *rest))


def test_another_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams, "vllm_version", lambda: "0.27.0")

    with pytest.raises(seams.SeamsChanged, match=r"needs vLLM 0\.26\.0; 0\.27\.0 is installed"):
        seams.check(ON_CPU)
