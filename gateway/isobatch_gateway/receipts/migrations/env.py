"""Performs: runs the migrations on the connection that the store gives."""

from alembic import context

from isobatch_gateway.receipts.store import METADATA


def migrate() -> None:
    """Run them within Alembic's context."""
    context.configure(connection=context.config.attributes["connection"], target_metadata=METADATA)
    with context.begin_transaction():
        context.run_migrations()


# The name under which Alembic executes this file; an import alone migrates nothing.
if __name__ == "env_py":
    migrate()
