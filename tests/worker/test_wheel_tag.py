from importlib import metadata
from pathlib import Path

import pytest
from isobatch_worker.wheel_tag import correct_wheel_tag, corrected

WHEEL = "Wheel-Version: 1.0\nTag: cp312-cp312-linux_x86_64\n"


def test_the_tag_is_that_of_the_python_it_is_installed_for() -> None:
    assert corrected(WHEEL, (3, 11)) == "Wheel-Version: 1.0\nTag: cp311-cp311-linux_x86_64\n"


def test_tags_for_any_python_stay() -> None:
    plain = "Tag: py3-none-any\n"

    assert corrected(plain, (3, 11)) == plain


def test_a_linked_file_is_replaced_and_its_twin_in_a_cache_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "thing-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n")
    (info / "RECORD").write_text("thing-1.0.dist-info/WHEEL,,\n")
    cached = tmp_path / "cached"
    cached.write_text(WHEEL)
    (info / "WHEEL").hardlink_to(cached)
    found = metadata.PathDistribution(info)
    monkeypatch.setattr(metadata, "distribution", lambda _: found)

    correct_wheel_tag("thing")

    assert "cp312" not in (info / "WHEEL").read_text()
    assert cached.read_text() == WHEEL
    assert sorted(p.name for p in info.iterdir()) == ["METADATA", "RECORD", "WHEEL"]


def test_a_distribution_that_is_not_there_is_left_alone() -> None:
    correct_wheel_tag("no-such-distribution")
