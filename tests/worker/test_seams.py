import dataclasses

import pytest
from isobatch_worker import seam_list, seams


@pytest.mark.parametrize("of", [seam_list.ON_CPU, seam_list.ON_CUDA], ids=["cpu", "cuda"])
def test_the_installed_vllm_is_the_one_that_was_read(of: tuple[seam_list.Seam, ...]) -> None:
    seams.check(of)


def test_a_seam_whose_source_changed_is_named() -> None:
    first, *rest = seam_list.ON_CPU
    changed = dataclasses.replace(first, digest="0" * 16)

    with pytest.raises(seams.SeamsChanged, match=first.name):
        seams.check((changed, *rest))


def test_another_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seams, "vllm_version", lambda: "0.27.0")

    with pytest.raises(seams.SeamsChanged, match=r"needs vLLM 0\.26\.0; 0\.27\.0 is installed"):
        seams.check(seam_list.ON_CPU)
