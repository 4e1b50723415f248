from pathlib import Path

from isobatch_contracts.resource import Tiers
from isobatch_contracts.routing_table import RoutingTable, dump
from isobatch_contracts.tiers import PoolName
from isobatch_gateway.health import admitted, is_suspect, read_figures
from isobatch_gateway.table_source import TableSource


def table(version: int, model: str = "m", default: str = "standard") -> RoutingTable:
    return RoutingTable(
        version=version,
        service="chat",
        model=model,
        tiers=Tiers.model_validate({"default": default}),
        pools=(PoolName.THROUGHPUT,),
    )


def versions(source: TableSource) -> dict[str, int]:
    return {t.model: t.version for t in source.tables()}


def test_every_table_of_the_folder_is_served(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(dump(table(1, "a")))
    (tmp_path / "b.json").write_text(dump(table(7, "b")))
    (tmp_path / ".c.json").write_text("being written")
    (tmp_path / "notes.txt").write_text("no table")
    source = TableSource(tmp_path)

    assert source.poll(0)
    assert versions(source) == {"a": 1, "b": 7}
    assert not source.poll(1)
    assert source.rejected == 0


def test_only_a_higher_version_follows(tmp_path: Path) -> None:
    file, source = tmp_path / "a.json", TableSource(tmp_path)
    for text, changes, rejected, version in (
        (dump(table(5)), True, 0, 5),
        (dump(table(4)), False, 1, 5),
        (dump(table(5, default="strict")), False, 2, 5),
        (dump(table(5)), False, 2, 5),
        (dump(table(6)), True, 2, 6),
        (dump(table(6))[:-40], False, 3, 6),
        (dump(table(9)).replace("sha256:", "sha256:0"), False, 4, 6),
    ):
        file.unlink(missing_ok=True)
        file.write_text(text + " " * rejected)
        assert (source.poll(0), source.rejected, versions(source)) == (
            changes,
            rejected,
            {"m": version},
        )


def test_the_age_grows_only_while_the_file_is_not_what_is_served(tmp_path: Path) -> None:
    file, source = tmp_path / "a.json", TableSource(tmp_path)
    file.write_text(dump(table(1)))
    source.poll(0)
    source.poll(10)
    assert source.ages(10) == {"m": 0}

    file.write_text("{")
    source.poll(20)
    assert source.ages(25) == {"m": 15}

    file.write_text(dump(table(2)))
    source.poll(30)
    assert source.ages(30) == {"m": 0}


def test_a_file_must_be_missed_twice_before_its_service_ends(tmp_path: Path) -> None:
    file, source = tmp_path / "a.json", TableSource(tmp_path)
    file.write_text(dump(table(1)))
    source.poll(0)
    file.unlink()

    assert not source.poll(1)
    assert versions(source) == {"m": 1}
    assert source.poll(2)
    assert versions(source) == {}


def test_a_folder_that_cannot_be_read_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "tables"
    folder.mkdir()
    (folder / "a.json").write_text(dump(table(1)))
    source = TableSource(folder)
    source.poll(0)
    folder.rename(tmp_path / "away")

    assert not source.poll(1)
    assert not source.poll(2)
    assert versions(source) == {"m": 1}


def test_two_files_of_one_model_do_not_fight(tmp_path: Path) -> None:
    source = TableSource(tmp_path)
    (tmp_path / "a.json").write_text(dump(table(1)))
    (tmp_path / "b.json").write_text(dump(table(9)))
    source.poll(0)
    assert (versions(source), source.rejected) == ({"m": 1}, 1)

    (tmp_path / "a.json").unlink()
    for now in range(1, 4):
        source.poll(now)
    assert versions(source) == {"m": 9}


def test_figures_are_read_from_vllms_metrics() -> None:
    text = b"""# HELP vllm:num_requests_running x
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
vllm:num_requests_waiting_by_reason{engine="0",reason="x"} 100.0
vllm:prompt_tokens_total{engine="0"} 1.5e+03
vllm:generation_tokens_total{engine="0"} 7.0
"""

    figures = read_figures(text)

    assert (figures.running, figures.waiting, figures.progress) == (5, 4, 1507.0)
    assert read_figures(b"nothing of the kind").running == 0


def test_only_what_owes_an_answer_and_is_silent_is_suspected() -> None:
    assert not is_suspect(None, 0.0, 1000.0, 30.0)
    assert not is_suspect(990.0, 0.0, 1000.0, 30.0)
    assert not is_suspect(900.0, 980.0, 1000.0, 30.0)
    assert is_suspect(900.0, 950.0, 1000.0, 30.0)


def test_numerics_that_are_no_certificate_admit_nobody() -> None:
    assert not admitted(b"", "sha256:" + "a" * 64)
    assert not admitted(b"{}", "sha256:" + "a" * 64)
    assert not admitted(b'{"state": "refused", "reason": "x"}', "sha256:" + "a" * 64)
    assert not admitted(b"null", None)
