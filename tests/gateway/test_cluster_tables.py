"""What a gateway makes of a cluster's objects."""

from typing import Any

from isobatch_contracts.resource import Tiers
from isobatch_contracts.routing_table import Revision, RoutingTable, dump
from isobatch_contracts.tiers import PoolName
from isobatch_gateway.cluster_tables import ClusterTables


def config(version: int, name: str = "chat", namespace: str = "a") -> dict[str, Any]:
    table = RoutingTable(
        version=version,
        service=name,
        model=name,
        tiers=Tiers(),
        pools=(PoolName.THROUGHPUT,),
        revisions=(
            Revision(name="r1", pool=PoolName.THROUGHPUT, weight=100, service=f"{name}-r1"),
        ),
    )
    metadata = {"name": f"{name}-routing", "namespace": namespace}
    return {"metadata": metadata, "data": {"table.json": dump(table)}}


def slice_of(*pods: str, name: str = "s1", namespace: str = "a", **more: Any) -> dict[str, Any]:
    endpoints = [
        {
            "addresses": [f"10.0.0.{number}"],
            "conditions": {"ready": True} | more,
            "targetRef": {"name": pod},
        }
        for number, pod in enumerate(pods, 1)
    ]
    labels = {"kubernetes.io/service-name": "chat-r1"}
    return {
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "ports": [{"name": "http", "port": 8000}],
        "endpoints": endpoints,
    }


def replicas(tables: ClusterTables) -> dict[str, str]:
    return {e.name: e.url for t in tables.tables() for r in t.revisions for e in r.endpoints}


def taken(tables: ClusterTables) -> bool:
    was, tables.has_changed = tables.has_changed, False
    return was


def test_replicas_are_the_ready_pods_of_the_revisions_service() -> None:
    tables = ClusterTables()
    tables.replace_configs(None, [config(1)])
    assert replicas(tables) == {}

    tables.replace_slices(None, [slice_of("p1", "p2"), slice_of("other", namespace="b")])
    assert taken(tables)
    assert replicas(tables) == {"p1": "http://10.0.0.1:8000", "p2": "http://10.0.0.2:8000"}

    tables.put_slice(slice_of("p1", "p2", ready=False))
    assert replicas(tables) == {}
    tables.put_slice(slice_of("p1", "p2", terminating=True))
    assert replicas(tables) == {}


def test_what_did_not_change_is_the_same_object() -> None:
    tables = ClusterTables()
    tables.replace_configs(None, [config(1), config(1, "other")])
    tables.put_slice(slice_of("p1"))
    before = {table.model: table for table in tables.tables()}

    tables.put_slice(slice_of("p1", "p2"))
    now = {table.model: table for table in tables.tables()}

    assert now["other"] is before["other"]
    assert now["chat"] is not before["chat"]
    taken(tables)
    tables.put_slice(slice_of("p1", "p2"))
    tables.put_config(config(1))
    assert not taken(tables)


def test_older_or_broken_tables_leave_the_last_good_one() -> None:
    tables = ClusterTables()
    tables.put_config(config(5))
    broken = config(6)
    broken["data"]["table.json"] = broken["data"]["table.json"].replace("r1", "r2")

    tables.put_config(config(4))
    tables.put_config(broken)

    assert [table.version for table in tables.tables()] == [5]
    assert tables.rejected == 2


def test_what_a_new_list_lacks_is_gone_in_its_namespace_alone() -> None:
    tables = ClusterTables()
    tables.replace_configs("a", [config(1), config(1, "second")])
    tables.replace_configs("b", [config(1, "third", "b")])

    tables.replace_configs("a", [config(1)])
    assert {table.model for table in tables.tables()} == {"chat", "third"}

    tables.drop_config("b/third-routing")
    assert {table.model for table in tables.tables()} == {"chat"}


def test_second_table_of_one_name_takes_over_when_the_first_goes() -> None:
    tables = ClusterTables()
    tables.put_config(config(3, namespace="a"))
    tables.put_config(config(1, namespace="b"))
    assert [table.version for table in tables.tables()] == [3]

    tables.drop_config("a/chat-routing")
    assert [table.version for table in tables.tables()] == [1]
