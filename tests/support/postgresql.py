# SPDX-License-Identifier: Apache-2.0
"""An image with Debian's PostgreSQL, and a record of the transactions whose commit it acknowledged."""

from __future__ import annotations

import collections
import fcntl
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs

from tests.support import debian, oci

PACKAGES = ("postgresql-15",)
PROGRAMS = "/usr/lib/postgresql/15/bin"
_PATH = f"PATH={PROGRAMS}:/usr/sbin:/usr/bin:/sbin:/bin"
# With these the client notices within seconds that the server's machine is gone, whether it was sending or
# not.
_NOTICE = "tcp_user_timeout=10000 keepalives_idle=3 keepalives_interval=2 keepalives_count=3"

#: pgbench's TPC-B transaction, and a row that records the run, the client and the transaction's number.
TRANSACTION = r"""
\set aid random(1, 100000)
\set bid 1
\set tid random(1, 10)
\set delta random(-5000, 5000)
\set number :number + 1
BEGIN;
UPDATE pgbench_accounts SET abalance = abalance + :delta WHERE aid = :aid;
SELECT abalance FROM pgbench_accounts WHERE aid = :aid;
UPDATE pgbench_tellers SET tbalance = tbalance + :delta WHERE tid = :tid;
UPDATE pgbench_branches SET bbalance = bbalance + :delta WHERE bid = :bid;
INSERT INTO pgbench_history (tid, bid, aid, delta, mtime)
    VALUES (:tid, :bid, :aid, :delta, CURRENT_TIMESTAMP);
INSERT INTO done VALUES (:run, :client_id, :number);
END;
"""
#: The container's command: serve a database with checksums, which is made if there is none yet.
SERVE = rf"""
set -e
as="setpriv --reuid=postgres --regid=postgres --init-groups --"
cd /
if [ ! -e /data/made ]; then
    rm -rf /data/postgresql
    install -d -o postgres -g postgres -m 700 /data/postgresql
    $as {PROGRAMS}/initdb --data-checksums --locale=C.UTF-8 -A trust -D /data/postgresql
    echo "host all all 0.0.0.0/0 trust" >>/data/postgresql/pg_hba.conf
    sync
    touch /data/made
fi
exec $as {PROGRAMS}/postgres -D /data/postgresql -c listen_addresses=* -c unix_socket_directories=/tmp
"""
#: Verify the checksums, after the server was shut down.
CHECK = (
    f"setpriv --reuid=postgres --regid=postgres --init-groups -- {PROGRAMS}/pg_checksums -D /data/postgresql"
)


@attrs.frozen
class PostgresqlTree:
    """Debian with PostgreSQL. :ivar tar: its tar. :ivar root: the same, unpacked."""

    tar: Path
    root: Path

    @classmethod
    def made(cls, cache: Path) -> PostgresqlTree:
        """Return the tree in the directory `cache`, and make it there first if need be."""
        cache.mkdir(parents=True, exist_ok=True)
        tree = cls(cache / "debian.tar", cache / "root")
        with (cache / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not tree.root.exists():
                new = cache / "new"
                shutil.rmtree(new, ignore_errors=True)
                with debian.tar(PACKAGES) as made:
                    shutil.copy(made, tree.tar)
                new.mkdir()
                unpack = ["tar", "--numeric-owner", "-xf", str(tree.tar), "-C", str(new)]
                subprocess.run(unpack, check=True)
                new.rename(tree.root)
        return tree

    def image(self) -> oci.BuiltImage:
        return oci.image([self.tar.read_bytes()], {"Cmd": ["bash"], "Env": [_PATH]}, compression="")

    def command(self, *words: str) -> list[str]:
        """Return a command line that runs one of the tree's programs on this machine."""
        return ["chroot", str(self.root), "/usr/bin/env", "-i", _PATH, "HOME=/", *words]


class Client:
    """Talks to a server from outside of its VM."""

    def __init__(self, tree: PostgresqlTree, address: str) -> None:
        self._tree = tree
        self.place = f"host={address} user=postgres connect_timeout=10"

    def run(self, *words: str, timeout: float = 300.0) -> subprocess.CompletedProcess[str]:
        """Run one of PostgreSQL's programs until it ends."""
        command = self._tree.command(*words)
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout)

    def query(self, sql: str) -> list[list[str]]:
        """Return the rows of a query. :raise RuntimeError: there is no answer, or an error."""
        done = self.run("psql", "-XAtq", "-F", "\t", "-v", "ON_ERROR_STOP=1", "-c", sql, self.place)
        if done.returncode:
            raise RuntimeError(done.stderr.strip())
        return [line.split("\t") for line in done.stdout.splitlines()]


class Load:
    """A running pgbench with `clients` clients, until the server or `end` ends it.

    :param run: a number that no other load on this database has.
    """

    def __init__(self, tree: PostgresqlTree, client: Client, run: int, clients: int) -> None:
        self._directory = tree.root / "tmp" / f"load-{run}"
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir()
        (self._directory / "transaction.sql").write_text(TRANSACTION)
        self._output = self._directory / "output"
        within = f"/tmp/load-{run}"
        words = ["pgbench", "--no-vacuum", f"--client={clients}", "--time=100000", "--progress=1"]
        words += ["--log", f"--log-prefix={within}/log", f"--file={within}/transaction.sql"]
        words += ["--define=number=0", f"--define=run={run}", f"{client.place} {_NOTICE}"]
        with self._output.open("w") as output:
            self._process = subprocess.Popen(
                tree.command(*words), stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def seconds(self) -> int:
        """For how many of the seconds of its run pgbench reported completed transactions."""
        return sum("progress:" in line and " 0.0 tps" not in line for line in self.output.splitlines())

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def acknowledged(self) -> Mapping[int, int]:
        """Return how many commits each client has seen acknowledged. Call it once pgbench has ended."""
        counts: collections.Counter[int] = collections.Counter()
        for log in self._directory.glob("log.*"):
            counts.update(int(line.split()[0]) for line in log.read_text().splitlines())
        return counts

    def end(self) -> None:
        """End pgbench, and remove its files. Idempotent."""
        if not self.ended:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)


def lost(acknowledged: Mapping[int, int], rows: Sequence[Sequence[str]]) -> list[str]:
    """Describe what is missing of each client's transactions, which follow one another, numbered from 1.

    :param rows: for each client: its number, its count of transactions, and the highest of their numbers."""
    found = {int(client): (int(count), int(highest)) for client, count, highest in rows}
    missing = []
    for client, told in acknowledged.items():
        count, highest = found.get(client, (0, 0))
        if not (count == highest and told <= count <= told + 1):
            missing.append(f"client {client}: {told} acknowledged, {count} there, the last is {highest}")
    return missing
