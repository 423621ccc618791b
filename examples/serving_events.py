"""Events of requests that outlive the process: a small interface, and SQLite behind it.

An event has published ids, so another store may be shared by programs with other rows.
"""

import sqlite3
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol


class NotStored(Exception):
    """The events could not be stored, and none of them was."""


class StoredEvent(NamedTuple):
    """rating: None if the model has none."""

    user: str
    item: str
    rating: float | None


class EventStore(Protocol):
    """Where events are kept."""

    def append(self, events: Sequence[StoredEvent]) -> None:
        """Store all of the events, and return when they outlive the process. NotStored if none
        is."""

    def load(self) -> Iterable[StoredEvent]:
        """The stored events, a user's in the order in which they came."""

    def forget(self, user: str) -> None:
        """Remove the user's events. NotStored if they stay."""

    def close(self) -> None:
        """Let another process open the store."""


class SQLiteEvents:
    """Events in a file of SQLite, which one process has open at a time. What `append` stored is
    there after the process is killed, or the machine loses power if its disk keeps what it synced.

    The file is bounded: a user's older events are removed once there are 2 * keep, down to `keep`.

    Args:
        log: the fingerprint of the log that these events follow. Those of another one would be
            repeated, or have other ids.
        keep: of a user's events, the latest ones that the model can see.

    Raises ValueError if the file has events of another log, OSError if it cannot be opened.
    """

    def __init__(self, path: Path, log: str, keep: int):
        self.keep = keep
        try:
            # the batcher's thread stores, and another one takes its place if it ends
            self._file = sqlite3.connect(path, timeout=0, check_same_thread=False)
            with self._file as file:
                file.execute("PRAGMA locking_mode = EXCLUSIVE")
                file.execute("PRAGMA journal_mode = WAL")
                file.execute("PRAGMA synchronous = FULL")  # syncs the log at each commit
                file.execute("CREATE TABLE IF NOT EXISTS log (fingerprint TEXT)")
                file.execute(
                    "CREATE TABLE IF NOT EXISTS events"
                    " (id INTEGER PRIMARY KEY, user TEXT NOT NULL, item TEXT NOT NULL, rating REAL)"
                )
                file.execute("CREATE INDEX IF NOT EXISTS of_user ON events (user, id)")
                file.execute("INSERT INTO log SELECT ? WHERE NOT EXISTS (SELECT * FROM log)", [log])
                (found,) = file.execute("SELECT fingerprint FROM log").fetchone()
                counts = file.execute("SELECT user, count(*) FROM events GROUP BY user")
                self._counts = Counter(dict(counts.fetchall()))
        except sqlite3.Error as error:
            raise OSError(f"{path} is not a file of events that can be opened: {error}") from error
        if found != log:
            self.close()
            raise ValueError(
                f"{path} has events that follow another log: fingerprint {found}, not {log}"
            )

    def append(self, events: Sequence[StoredEvent]) -> None:
        counts = Counter(event.user for event in events)
        full = [user for user in counts if self._counts[user] + counts[user] >= 2 * self.keep]
        try:
            with self._file as file:
                file.executemany("INSERT INTO events (user, item, rating) VALUES (?, ?, ?)", events)
                file.executemany(
                    "DELETE FROM events WHERE user = ?1 AND id <= (SELECT id FROM events"
                    " WHERE user = ?1 ORDER BY id DESC LIMIT 1 OFFSET ?2)",
                    [(user, self.keep) for user in full],
                )
        except sqlite3.Error as error:
            raise NotStored(f"the events could not be stored: {error}") from error
        self._counts.update(counts)
        for user in full:
            self._counts[user] = self.keep

    def load(self) -> list[StoredEvent]:
        rows = self._file.execute("SELECT user, item, rating FROM events ORDER BY id")
        return [StoredEvent(*row) for row in rows]

    def forget(self, user: str) -> None:
        try:
            with self._file as file:
                file.execute("DELETE FROM events WHERE user = ?", [user])
        except sqlite3.Error as error:
            raise NotStored(f"the events could not be removed: {error}") from error
        del self._counts[user]

    def close(self) -> None:
        self._file.close()
