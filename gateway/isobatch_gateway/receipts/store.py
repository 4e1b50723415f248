"""Performs: keeps records in SQLite (WAL) or PostgreSQL; one schema, by Alembic's migrations."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from sqlalchemy.exc import SQLAlchemyError

from isobatch_gateway.files import create_private
from isobatch_gateway.receipts.chain import START, Head, Sealed, digest_of

METADATA = sa.MetaData()
RECORDS = sa.Table(
    "records",
    METADATA,
    sa.Column("chain", sa.Text, primary_key=True),
    sa.Column("seq", sa.BigInteger, primary_key=True),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("receipt", sa.Text),
    sa.Column("tenant", sa.Text),
    sa.Column("at", sa.BigInteger, nullable=False),
    sa.Column("payload", sa.LargeBinary, nullable=False),
    sa.Column("signature", sa.LargeBinary, nullable=False),
)
# Few rows: what start-up has to close is found without a walk over the ledger.
PENDING = sa.Table(
    "pending",
    METADATA,
    sa.Column("receipt", sa.Text, primary_key=True),
    sa.Column("chain", sa.Text, nullable=False),
    sa.Column("seq", sa.BigInteger, nullable=False),
)
CONTENTS = sa.Table(
    "contents",
    METADATA,
    sa.Column("receipt", sa.Text, primary_key=True),
    sa.Column("at", sa.BigInteger, nullable=False),
    sa.Column("sealed", sa.LargeBinary, nullable=False),
)
_PAGE = 2000
_BUSY = 10.0  # seconds that another process may hold SQLite's write lock


class StoreFailed(Exception):
    """The database did not do what was asked; the message says why, without content."""


class Row(NamedTuple):
    """A record to be kept, with whose it is, and content (encrypted) that belongs to it."""

    record: Sealed
    tenant: str | None
    content: bytes | None = None


class Store:
    """The ledger's database. One thread writes; any may read."""

    def __init__(self, url: str) -> None:
        """Open `url` (SQLAlchemy's) and bring its schema up to date. Raises `StoreFailed`."""
        try:
            self._engine = _engine(url)
            _migrate(self._engine)
        except (SQLAlchemyError, OSError) as exc:
            raise StoreFailed(_said(exc)) from exc

    def write(self, rows: Sequence[Row]) -> None:
        """Keep `rows`, all or none; durable once it returns. Raises `StoreFailed`."""
        try:
            with self._engine.begin() as connection:
                connection.execute(sa.insert(RECORDS), [_values(row) for row in rows])
                opened = [r.record for r in rows if r.record.kind == "open"]
                closed = {r.record.receipt for r in rows if r.record.kind == "final"}
                came = [r for r in opened if r.receipt not in closed]
                if came:
                    names = ("receipt", "chain", "seq")
                    values = [{name: getattr(r, name) for name in names} for r in came]
                    connection.execute(sa.insert(PENDING), values)
                if closed:
                    connection.execute(sa.delete(PENDING).where(PENDING.c.receipt.in_(closed)))
                contents = [
                    {"receipt": r.record.receipt, "at": r.record.at, "sealed": r.content}
                    for r in rows
                    if r.content is not None
                ]
                if contents:
                    connection.execute(sa.insert(CONTENTS), contents)
        except SQLAlchemyError as exc:
            raise StoreFailed(_said(exc)) from exc

    def head(self, chain: str) -> Head:
        """The last record of `chain`."""
        query = _records().where(RECORDS.c.chain == chain).order_by(RECORDS.c.seq.desc()).limit(1)
        for found in self._read(query):
            return Head(found.seq, digest_of(found.payload))
        return START

    def pending(self, chain: str) -> list[Sealed]:
        """The `open` records of `chain` without a final one."""
        joined = RECORDS.join(
            PENDING, (RECORDS.c.chain == PENDING.c.chain) & (RECORDS.c.seq == PENDING.c.seq)
        )
        query = _records().select_from(joined).where(PENDING.c.chain == chain)
        return list(self._read(query.order_by(RECORDS.c.seq)))

    def of_receipt(self, receipt: str) -> list[Sealed]:
        """All records of one receipt, in their order."""
        query = _records().where(RECORDS.c.receipt == receipt)
        return list(self._read(query.order_by(RECORDS.c.chain, RECORDS.c.seq)))

    def content(self, receipt: str) -> bytes | None:
        """The encrypted content of a receipt, if it has one."""
        query = sa.select(CONTENTS.c.sealed).where(CONTENTS.c.receipt == receipt)
        with self._reading() as connection:
            found = connection.execute(query).scalar_one_or_none()
        return None if found is None else bytes(found)

    def chains(self) -> list[str]:
        """The chains that the ledger has."""
        with self._reading() as connection:
            return list(connection.execute(sa.select(RECORDS.c.chain).distinct()).scalars())

    def walk(self, chain: str) -> Iterator[Sealed]:
        """The records of `chain` in order, page by page."""
        after = 0
        while True:
            query = _records().where((RECORDS.c.chain == chain) & (RECORDS.c.seq > after))
            page = list(self._read(query.order_by(RECORDS.c.seq).limit(_PAGE)))
            yield from page
            if len(page) < _PAGE:
                return
            after = page[-1].seq

    def kind(self, chain: str, kind: str) -> list[Sealed]:
        """The records of one kind (not `open` or `final`: they are many)."""
        query = _records().where((RECORDS.c.chain == chain) & (RECORDS.c.kind == kind))
        return list(self._read(query.order_by(RECORDS.c.seq)))

    def receipts(self, since: int, tenant: str | None, limit: int) -> list[str]:
        """Ids of receipts that ended at or after `since` (ms), of `tenant` or of all; oldest first.

        At most `limit`.
        """
        query = sa.select(RECORDS.c.receipt).where(
            (RECORDS.c.kind == "final") & (RECORDS.c.at >= since)
        )
        if tenant is not None:
            query = query.where(RECORDS.c.tenant == tenant)
        query = query.order_by(RECORDS.c.at).limit(limit)
        with self._reading() as connection:
            return [str(found) for found in connection.execute(query).scalars()]

    def tenant(self, receipt: str) -> str | None:
        """Whose receipt it is; None if there is none."""
        query = sa.select(RECORDS.c.tenant).where(RECORDS.c.receipt == receipt).limit(1)
        with self._reading() as connection:
            return connection.execute(query).scalar_one_or_none()

    def expired(self, chain: str, before: int) -> Sealed | None:
        """The last record that may go: older than `before` (ms), and nothing pending up to it."""
        oldest_pending = sa.select(sa.func.min(PENDING.c.seq)).where(PENDING.c.chain == chain)
        young = sa.select(sa.func.min(RECORDS.c.seq)).where(
            (RECORDS.c.chain == chain) & (RECORDS.c.at >= before)
        )
        with self._reading() as connection:
            found = [connection.execute(q).scalar_one_or_none() for q in (oldest_pending, young)]
        ends = [int(end) for end in found if end is not None]
        query = _records().where(RECORDS.c.chain == chain)
        if ends:
            query = query.where(RECORDS.c.seq < min(ends))
        for record in self._read(query.order_by(RECORDS.c.seq.desc()).limit(1)):
            return record
        return None

    def replace(self, chain: str, through: int, tombstone: Row) -> None:
        """Remove what `chain` has up to `through` and keep `tombstone`, as one transaction."""
        gone = (RECORDS.c.chain == chain) & (RECORDS.c.seq <= through)
        receipts = sa.select(RECORDS.c.receipt).where(gone & RECORDS.c.receipt.is_not(None))
        try:
            with self._engine.begin() as connection:
                connection.execute(sa.delete(CONTENTS).where(CONTENTS.c.receipt.in_(receipts)))
                connection.execute(sa.delete(RECORDS).where(gone))
                connection.execute(sa.insert(RECORDS), [_values(tombstone)])
        except SQLAlchemyError as exc:
            raise StoreFailed(_said(exc)) from exc

    def close(self) -> None:
        """Let go of the database."""
        self._engine.dispose()

    @contextmanager
    def _reading(self) -> Iterator[sa.Connection]:
        try:
            with self._engine.connect() as connection:
                yield connection
        except SQLAlchemyError as exc:
            raise StoreFailed(_said(exc)) from exc

    def _read(self, query: sa.Select[Any]) -> Iterator[Sealed]:
        with self._reading() as connection:
            rows = connection.execute(query).all()
        for chain, seq, kind, receipt, at, payload, signature in rows:
            yield Sealed(chain, seq, kind, receipt, at, bytes(payload), bytes(signature))


def _records() -> sa.Select[Any]:
    names = ("chain", "seq", "kind", "receipt", "at", "payload", "signature")
    return sa.select(*(RECORDS.c[name] for name in names))


def _values(row: Row) -> dict[str, object]:
    return {**row.record._asdict(), "tenant": row.tenant}


def _engine(url: str) -> sa.Engine:
    if "://" not in url:
        path = Path(url).absolute()
        path.parent.mkdir(parents=True, exist_ok=True)
        create_private(path, b"")
        url = f"sqlite:///{path}"
    if not url.startswith("sqlite"):
        return sa.create_engine(
            url.replace("postgresql://", "postgresql+psycopg://", 1),
            pool_pre_ping=True,
            connect_args={"connect_timeout": 5},
        )
    engine = sa.create_engine(url, connect_args={"timeout": _BUSY, "check_same_thread": False})

    @sa.event.listens_for(engine, "connect")
    def durable(connection: object, _: object) -> None:
        cursor = connection.cursor()  # type: ignore[attr-defined]  # sqlite3's
        # WAL with FULL: a commit is on the disk when it returns, in one fsync.
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "wal_autocheckpoint=4000"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    return engine


def _migrate(engine: sa.Engine) -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            # Gateways that start together: one migrates, the others find it done.
            connection.execute(sa.text("SELECT pg_advisory_xact_lock(7305801)"))
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def _said(exc: BaseException) -> str:
    """The driver's own sentence; SQLAlchemy's adds statement and parameters."""
    return str(getattr(exc, "orig", None) or exc).strip().partition("\n")[0]
