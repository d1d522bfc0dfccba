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
from collections.abc import Iterable, Iterator
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
from infranetes.control.config_secrets import without_secrets
from infranetes.control.secret_files import secrets_in, secrets_of_files
from infranetes.control.secrets import Scrubber
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

_PATH = re.compile(r"""["'](/[^"'\n]+)["']""")  # in a file that is no TOML
_FAILURES = (InfranetesError, GrpcError, OSError, sqlite3.Error)


@attrs.define
class Bundle:
    """The files of a bundle by their names, with the secrets that are in them, and why others are missing.

    :ivar texts: those that are text. :ivar documents: those that are JSON."""

    texts: dict[str, str] = attrs.field(factory=dict)
    documents: dict[str, object] = attrs.field(factory=dict)
    missing: dict[str, str] = attrs.field(factory=dict)

    def lacks(self, name: str, error: Exception) -> None:
        """Note why a file is missing."""
        why = error.message or error.code.name if isinstance(error, GrpcError) else str(error)
        self.missing[name] = why or type(error).__name__

    def cleaned(self, secrets: Iterable[str]) -> dict[str, bytes]:
        """Return all files without secrets, each cut at MAX_PART. Blocks."""
        scrubber = Scrubber(secrets)
        self.missing = {scrubber.clean(name): scrubber.clean(why) for name, why in self.missing.items()}
        self.documents["manifest.json"] = {"versions": host.versions(), "missing": self.missing}
        found = {name: scrubber.clean(text) for name, text in self.texts.items()}
        for name, document in self.documents.items():  # before they are JSON, in which texts are escaped
            found[name] = json.dumps(scrubber.clean_document(document), indent=2, default=str) + "\n"
        return {name: found[name].encode(errors="replace")[:MAX_PART] for name in sorted(found)}


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
        parts = await run_in_thread(session.reactor, bundle.cleaned, secrets)
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
    tables: list[object] = []
    for number, file in enumerate(_files_of(main)):
        name, text = f"configuration/{number:02d}-{_word(file.name)}.json", ""
        try:
            text = file.read_text(encoding="utf-8")
            table = tomllib.loads(text)
        except (OSError, ValueError, RecursionError) as error:
            bundle.lacks(name, error)
            secrets += secrets_in(text)
            tables.append({"": _PATH.findall(text)})
            continue
        shown = without_secrets(table)
        tables.append(table)
        secrets += shown.secrets
        bundle.documents[name] = {"file": str(file), "table": shown.table}
    unread: dict[str, str] = {}
    secrets += secrets_of_files({"": tables}, unread)
    for path, why in unread.items():
        bundle.missing[f"a search for the secrets of {path}"] = why
    return secrets


def _files_of(main: Path) -> Iterator[Path]:
    yield main
    directory = Path(f"{main}{config_files.SUFFIX}")
    if directory.is_dir():
        yield from sorted(each for each in directory.iterdir() if config_files.is_drop_in(each.name))


async def _add_host(session: Session, bundle: Bundle, config: Config) -> None:
    for name, work in (("host.json", host.facts), ("store.json", host.schema)):
        try:
            bundle.documents[name] = await run_in_thread(session.reactor, work, config.state_dir)
        except _FAILURES as error:
            bundle.lacks(name, error)
    bundle.documents["programs.json"] = await host.programs(session.reactor)


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
        bundle.texts["journal.txt"] = _end(output.stdout.decode(errors="replace"), MAX_PART)
    except _FAILURES as error:
        bundle.lacks("journal.txt", error)


# ---- the daemon


async def _add_status(session: Session, bundle: Bundle, config: Config) -> None:
    channel = Channel(session.reactor, UNIXClientEndpoint(session.reactor, config.socket_path, timeout=10))
    try:
        runtime = channel.stub(cri.RuntimeService)
        status = await runtime.Status(cri.StatusRequest(verbose=True), timeout=ASK_SECONDS)
        bundle.documents["status.json"] = _status(MessageToDict(cast(Message, status)))
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
        bundle.documents["pods.json"] = render.as_json("pods", listed, options)
    except _FAILURES as error:
        bundle.lacks("pods.json", error)
        return  # the daemon would answer nothing else, either
    try:
        pool = await stub.GetPool(control.GetPoolRequest(), timeout=ASK_SECONDS)
        bundle.documents["pool.json"] = render.as_json("pool", pool, options)
    except _FAILURES as error:
        bundle.lacks("pool.json", error)
    try:
        orphans = await stub.ListOrphans(control.ListOrphansRequest(), timeout=ORPHAN_SECONDS)
        bundle.documents["orphans.json"] = render.as_json("orphans", orphans, options)
    except _FAILURES as error:
        bundle.lacks("orphans.json", error)
    if len(pods) > MOST_PODS:
        bundle.missing["pods"] = f"of {len(pods)} pods the newest {MOST_PODS} are here"
    newest = sorted(pods, key=lambda pod: pod.created_at)[-MOST_PODS:]
    await _add_lives(session, bundle, [pod.id for pod in newest])


async def _add_lives(session: Session, bundle: Bundle, ids: list[str]) -> None:
    """Add the timeline and the console of each pod."""
    stub, options = session.stub, session.options
    for id in ids:
        directory = f"pods/{_word(id)}"
        try:
            life = await stub.DescribePod(control.DescribePodRequest(pod=id), timeout=ASK_SECONDS)
            bundle.documents[f"{directory}/describe.json"] = render.as_json("describe", life, options)
            bundle.texts[f"{directory}/describe.txt"] = render.as_text("describe", life, options)
        except _FAILURES as error:
            bundle.lacks(f"{directory}/describe.json", error)
        try:
            console = await stub.GetConsole(control.GetConsoleRequest(sandbox=id), timeout=ASK_SECONDS)
            text = _end(console.text, MAX_CONSOLE) + _end(console.output, MAX_CONSOLE)
            bundle.texts[f"{directory}/console.txt"] = text
        except _FAILURES as error:
            bundle.lacks("consoles", error)


def _status(status: dict[str, object]) -> dict[str, object]:
    """Return the CRI's Status with the documents in it as such: it has them as JSON in texts."""
    info = status.get("info")
    if not isinstance(info, dict):
        return status
    return {**status, "info": {key: _json(text) for key, text in info.items()}}


def _json(text: str) -> object:
    try:
        found: object = json.loads(text)
    except ValueError:
        return text
    return found


def _end(text: str, most: int) -> str:
    """Return the end of a text, in whole lines: half a secret can't be recognised."""
    if len(text) <= most:
        return text
    return text[-most:].partition("\n")[2]


def _word(name: str) -> str:
    """Return a name with what a file's name can't have replaced."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)[:128]
