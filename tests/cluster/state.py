"""Decides what is kept of a running cluster: enough to end it, however its starter ended."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from tests.cluster.control_plane import Ports
from tests.cluster.processes import Running


class State(BaseModel):
    """The file `state.json` of a cluster."""

    model_config = ConfigDict(extra="forbid")

    name: str
    address: str
    ports: Ports
    has_node: bool
    owner: Running | None  # whose end makes the cluster a leftover; None: it stays until `down`
    holder: Running | None = None
    programs: dict[str, Running] = {}

    @classmethod
    def read(cls, folder: Path) -> "State":
        """The state kept in `folder`."""
        return cls.model_validate_json((folder / "state.json").read_text())

    def write(self, folder: Path) -> None:
        """Keep it: whole, or as it was before."""
        new = folder / "state.json.new"
        new.write_text(self.model_dump_json(indent=2))
        new.replace(folder / "state.json")
