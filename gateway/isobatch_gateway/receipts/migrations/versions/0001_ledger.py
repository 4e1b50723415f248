"""The ledger's first schema."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the tables."""
    op.create_table(
        "records",
        sa.Column("chain", sa.Text, primary_key=True),
        sa.Column("seq", sa.BigInteger, primary_key=True),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("receipt", sa.Text),
        sa.Column("tenant", sa.Text),
        sa.Column("at", sa.BigInteger, nullable=False),
        sa.Column("payload", sa.LargeBinary, nullable=False),
        sa.Column("signature", sa.LargeBinary, nullable=False),
    )
    op.create_index("records_receipt", "records", ["receipt"])
    op.create_index("records_at", "records", ["kind", "at"])
    op.create_table(
        "pending",
        sa.Column("receipt", sa.Text, primary_key=True),
        sa.Column("chain", sa.Text, nullable=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "contents",
        sa.Column("receipt", sa.Text, primary_key=True),
        sa.Column("at", sa.BigInteger, nullable=False),
        sa.Column("sealed", sa.LargeBinary, nullable=False),
    )


def downgrade() -> None:
    """Drop the tables."""
    for table in ("contents", "pending", "records"):
        op.drop_table(table)
