# SPDX-License-Identifier: Apache-2.0
"""`infranetes-ctl support-bundle`: what a maintainer needs to know of a node, in one file without secrets.

What can't be had is named in the bundle's manifest, and the rest is written all the same: a bundle is needed
most when the daemon does not run.
"""

from __future__ import annotations

import json
import platform
import re
import sqlite3
import tomllib
from argparse import Namespace
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

import attrs
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from twisted.internet.endpoints import UNIXClientEndpoint

from infranetes import config as configuration
from infranetes.config import Config
from infranetes.control import archive, host, render
from infranetes.control.secrets import Scrubber, paths_in, secrets_in, secrets_of, without_secrets
from infranetes.control.session import DONE, Session, config_file
from infranetes_common import config_files
from infranetes_common.commands import run
from infranetes_common.concurrency import run_in_thread
from infranetes_common.errors import ConfigError, FailedPrecondition, InfranetesError
from infranetes_common.wire import control, cri
from txgrpc import Channel, GrpcError

UNIT = "infranetes"
ASK_SECONDS, ORPHAN_SECONDS, JOURNAL_SECONDS = 15.0, 150.0, 60.0
MOST_PODS = 300
JOURNAL_LINES = 20_000
MAX_PART = 8 << 20  # bytes
MAX_CONSOLE = 64 * 1024  # characters
MAX_SECRETS = 256 * 1024  # bytes of a file of secrets

_FAILURES = (InfranetesError, GrpcError, OSError, sqlite3.Error)


@attrs.define
class Bundle:
    """The files of a bundle by their names, and why others are missing."""

    files: dict[str, str] = attrs.field(factory=dict)
    missing: dict[str, str] = attrs.field(factory=dict)

    def add_json(self, name: str, document: object) -> None:
        """Add a JSON file."""
        self.files[name] = json.dumps(document, indent=2, default=str) + "\n"

    def lacks(self, name: str, error: Exception) -> None:
        """Note why a file is missing."""
        why = error.message or error.code.name if isinstance(error, GrpcError) else str(error)
        self.missing[name] = why or type(error).__name__

    def cleaned(self, scrubber: Scrubber) -> dict[str, bytes]:
        """Return all files without secrets, each cut at MAX_PART."""
        self.add_json("manifest.json", {"versions": host.versions(), "missing": self.missing})
        return {
            name: scrubber.clean(text).encode(errors="replace")[:MAX_PART]
            for name, text in sorted(self.files.items())
        }


async def support_bundle(session: Session) -> int:
    """Write the bundle and say where it is.

    :raise FailedPrecondition: the file is there already, or can't be written."""
    path = session.options.file or Path(_default_name())
    with archive.new_file(path) as file:
        bundle = Bundle()
        config = _config(bundle, session.options)
        secrets = await run_in_thread(session.reactor, _add_configuration, bundle, session.options)
        await _add_host(session, bundle, config)
        await _add_status(session, bundle, config)
        await _add_daemon(session, bundle)
        await _add_journal(session, bundle)
        parts = bundle.cleaned(Scrubber(secrets))
        await run_in_thread(session.reactor, archive.write, file, path.name.partition(".")[0], parts)
    _tell(session, path, bundle, sorted(parts))
    return DONE


def _default_name() -> str:
    node = re.sub(r"[^A-Za-z0-9-]", "-", platform.node())[:63]
    return f"infranetes-support-{node}-{datetime.now(UTC):%Y%m%d-%H%M%S}.tar.gz"


def _tell(session: Session, path: Path, bundle: Bundle, names: list[str]) -> None:
    if session.options.json:
        session.print(json.dumps({"file": str(path), "parts": names, "missing": bundle.missing}, indent=2))
        return
    session.print(
        f"{path}: {len(names)} files, readable by you alone; look through them before you pass them on"
    )
    for name, why in bundle.missing.items():
        session.print(f"without {name}: {why}")


# ---- this node


def _config(bundle: Bundle, options: Namespace) -> Config:
    """Return the configuration; if something is wrong with it, note that and return the defaults."""
    file = config_file(options)
    try:
        return configuration.load(None if file is None else str(file), {})
    except ConfigError as error:
        bundle.lacks("configuration", error)
        return Config()


def _add_configuration(bundle: Bundle, options: Namespace) -> list[str]:
    """Add the configuration's files with their secrets hidden. Returns the secrets. Blocks."""
    main = config_file(options)
    if main is None:
        bundle.missing["configuration"] = "there is no file: all is as by default"
        return []
    secrets: list[str] = []
    for number, file in enumerate(_files_of(main)):
        name = f"configuration/{number:02d}-{_word(file.name)}.json"
        try:
            table = tomllib.loads(file.read_text())
        except (OSError, ValueError) as error:
            bundle.lacks(name, error)
            continue
        secrets += [*secrets_of(table), *_secrets_of_files(table)]
        bundle.add_json(name, {"file": str(file), "table": without_secrets(table)})
    return secrets


def _files_of(main: Path) -> Iterator[Path]:
    yield main
    directory = Path(f"{main}{config_files.SUFFIX}")
    if directory.is_dir():
        yield from sorted(each for each in directory.iterdir() if config_files.is_drop_in(each.name))


def _secrets_of_files(table: object) -> Iterator[str]:
    """Yield the secrets in all files that a table names, at any depth: any value may be a path."""
    if isinstance(table, dict | list):
        for each in table.values() if isinstance(table, dict) else table:
            yield from _secrets_of_files(each)
    elif isinstance(table, str) and table.startswith("/"):
        path = Path(table)
        try:
            if path.is_file() and path.stat().st_size <= MAX_SECRETS:
                text = path.read_text()
                yield from secrets_in(text)
                yield from _secrets_of_files([str(path.parent / each) for each in paths_in(text)])
        except (OSError, ValueError):
            return


async def _add_host(session: Session, bundle: Bundle, config: Config) -> None:
    for name, work in (("host.json", host.facts), ("store.json", host.schema)):
        try:
            bundle.add_json(name, await run_in_thread(session.reactor, work, config.state_dir))
        except _FAILURES as error:
            bundle.lacks(name, error)
    bundle.add_json("programs.json", await host.programs(session.reactor))


async def _add_journal(session: Session, bundle: Bundle) -> None:
    command = [
        "journalctl",
        "--unit",
        UNIT,
        "--lines",
        str(JOURNAL_LINES),
        "--no-pager",
        "--output",
        "short-iso",
    ]
    try:
        output = await run(session.reactor, command, JOURNAL_SECONDS, max_output=4 * MAX_PART)
        if output.code:
            raise FailedPrecondition(output.message())
        bundle.files["journal.txt"] = output.stdout[-MAX_PART:].decode(errors="replace")
    except _FAILURES as error:
        bundle.lacks("journal.txt", error)


# ---- the daemon


async def _add_status(session: Session, bundle: Bundle, config: Config) -> None:
    channel = Channel(session.reactor, UNIXClientEndpoint(session.reactor, config.socket_path, timeout=10))
    try:
        runtime = channel.stub(cri.RuntimeService)
        status = await runtime.Status(cri.StatusRequest(verbose=True), timeout=ASK_SECONDS)
        bundle.add_json("status.json", MessageToDict(cast(Message, status)))
    except _FAILURES as error:
        bundle.lacks("status.json", error)
    finally:
        await channel.close()


async def _add_daemon(session: Session, bundle: Bundle) -> None:
    stub, options = session.stub, session.options
    pods: list[control.Pod] = []
    try:
        listed = await stub.ListPods(control.ListPodsRequest(past=True), timeout=ASK_SECONDS)
        pods = list(listed.pods)
        bundle.add_json("pods.json", render.as_json("pods", listed, options))
    except _FAILURES as error:
        bundle.lacks("pods.json", error)
        return  # the daemon would answer nothing else, either
    try:
        pool = await stub.GetPool(control.GetPoolRequest(), timeout=ASK_SECONDS)
        bundle.add_json("pool.json", render.as_json("pool", pool, options))
    except _FAILURES as error:
        bundle.lacks("pool.json", error)
    try:
        orphans = await stub.ListOrphans(control.ListOrphansRequest(), timeout=ORPHAN_SECONDS)
        bundle.add_json("orphans.json", render.as_json("orphans", orphans, options))
    except _FAILURES as error:
        bundle.lacks("orphans.json", error)
    if len(pods) > MOST_PODS:
        bundle.missing["pods"] = f"of {len(pods)} pods the newest {MOST_PODS} are here"
    newest = sorted(pods, key=lambda pod: pod.created_at)[-MOST_PODS:]
    async for name, text in _lives(session, bundle, [pod.id for pod in newest]):
        bundle.files[name] = text


async def _lives(session: Session, bundle: Bundle, ids: list[str]) -> AsyncIterator[tuple[str, str]]:
    """Yield the timeline and the console of each pod."""
    stub, options = session.stub, session.options
    for id in ids:
        directory = f"pods/{_word(id)}"
        try:
            life = await stub.DescribePod(control.DescribePodRequest(pod=id), timeout=ASK_SECONDS)
            yield (
                f"{directory}/describe.json",
                json.dumps(render.as_json("describe", life, options), indent=2),
            )
            yield f"{directory}/describe.txt", render.as_text("describe", life, options)
        except _FAILURES as error:
            bundle.lacks(f"{directory}/describe.json", error)
        try:
            console = await stub.GetConsole(control.GetConsoleRequest(sandbox=id), timeout=ASK_SECONDS)
            yield f"{directory}/console.txt", console.text[-MAX_CONSOLE:] + console.output[-MAX_CONSOLE:]
        except _FAILURES as error:
            bundle.lacks("consoles", error)


def _word(name: str) -> str:
    """Return a name with what a file's name can't have replaced."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)[:128]
