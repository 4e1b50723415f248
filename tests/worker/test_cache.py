from pathlib import Path

import pytest
from isobatch_worker.cache import usable_cache_dir
from isobatch_worker.errors import CacheUnusable


def test_a_cache_folder_is_made_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISOBATCH_CACHE_DIR", str(tmp_path / "a" / "b"))

    assert usable_cache_dir().is_dir()


@pytest.mark.parametrize("place", ["file/below", "/proc/isobatch"])
def test_a_cache_folder_that_cannot_be_is_named_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ISOBATCH_CACHE_DIR", str(tmp_path / place))

    with pytest.raises(CacheUnusable, match=f"{place}.*set ISOBATCH_CACHE_DIR"):
        usable_cache_dir()
