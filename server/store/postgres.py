"""A PostgreSQL database, which the front ends of all nodes have open."""

import contextlib
from collections.abc import Iterator, Sequence

import psycopg

from server.store.records import BackendFailed
from server.store.sql import TABLES, Rows, SqlBackend

_WAIT = 10
"""Seconds for which a front end waits for a connection, a lock or a statement."""
_LOCK = 0x5357_454C_4C
"""Number of the lock that whoever makes changes has."""
_TRIGGERS = """
CREATE OR REPLACE FUNCTION account() RETURNS trigger AS $$ BEGIN
    IF TG_OP <> 'DELETE' THEN
        INSERT INTO tenants VALUES (NEW.tenant, NEW.size)
            ON CONFLICT (tenant) DO UPDATE SET bytes = tenants.bytes + NEW.size;
    END IF;
    IF TG_OP <> 'INSERT' THEN
        UPDATE tenants SET bytes = bytes - OLD.size WHERE tenant = OLD.tenant;
    END IF;
    RETURN NULL;
END $$ LANGUAGE plpgsql;
CREATE OR REPLACE FUNCTION forget_events() RETURNS trigger AS $$ BEGIN
    DELETE FROM events WHERE tenant = OLD.tenant AND response = OLD.id;
    RETURN NULL;
END $$ LANGUAGE plpgsql;
CREATE OR REPLACE TRIGGER events_out AFTER DELETE ON responses
    FOR EACH ROW EXECUTE FUNCTION forget_events();
""" + "".join(
    f"""
CREATE OR REPLACE TRIGGER {table}_account AFTER INSERT OR DELETE OR UPDATE OF size ON {table}
    FOR EACH ROW EXECUTE FUNCTION account();
"""
    for table in ("responses", "conversations")
)


def postgres_backend(url: str, max_bytes: int, max_age: float) -> SqlBackend:
    """Return what keeps records in a database, in a schema of its own that is named `swell`.

    Raises:
        OSError: the database cannot be used.
    """
    return SqlBackend(PostgresDatabase(url), max_bytes, max_age)


class PostgresDatabase:
    """A connection that is made anew when it was lost; see `server.store.sql.Database`.

    Args:
        url: `postgresql://...`, as libpq has it; what it leaves out is in libpq's variables and
            files.

    Raises:
        OSError: the database cannot be used.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._in_transaction = False
        try:
            self._connection = self._connect()
            with self.transaction():
                self.execute("CREATE SCHEMA IF NOT EXISTS swell")
                self.execute(TABLES.format(BYTES="BYTEA") + _TRIGGERS)
        except (psycopg.Error, BackendFailed) as error:
            raise OSError(f"the store of responses cannot be used: {error}") from error

    def _connect(self) -> "psycopg.Connection[tuple[object, ...]]":
        connection = psycopg.connect(
            self._url, autocommit=True, connect_timeout=_WAIT, application_name="swell"
        )
        for setting in (
            "search_path = swell", f"statement_timeout = '{_WAIT}s'",
            f"idle_in_transaction_session_timeout = '{2 * _WAIT}s'",
        ):  # fmt: skip
            connection.execute(f"SET {setting}".encode())
        return connection

    def close(self) -> None:
        """Let go of the connection."""
        self._connection.close()

    def execute(self, statement: str, values: Sequence[object] = ()) -> Rows:
        """Execute a statement; if the connection is lost on another, but in no transaction."""
        # No text here has a NUL, which the database does not take.
        sent = [each.replace("\0", "\ufffd") if isinstance(each, str) else each for each in values]
        text = statement.replace("?", "%s").encode()
        try:
            try:
                return self._connection.execute(text, sent or None)
            except psycopg.OperationalError:
                if self._in_transaction or not self._connection.closed:
                    raise
            self._connection = self._connect()
            return self._connection.execute(text, sent or None)
        except psycopg.Error as error:
            raise BackendFailed(str(error)) from error

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Make changes that are kept together, or not at all; nobody else makes any meanwhile."""
        self.execute("BEGIN")
        self._in_transaction = True
        try:
            self.execute("SELECT pg_advisory_xact_lock(?)", (_LOCK,))
            yield
            self.execute("COMMIT")
        except BaseException:
            if not self._connection.closed:
                with contextlib.suppress(BackendFailed):  # at its end at the latest
                    self.execute("ROLLBACK")
            raise
        finally:
            self._in_transaction = False
