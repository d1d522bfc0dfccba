# SPDX-License-Identifier: Apache-2.0
"""`infranetes-ctl support-bundle`: what a maintainer needs to know of a node, in one file without secrets.

What can't be had is named in the bundle's manifest, and the rest is written all the same: a bundle is needed
most when the daemon does not run.
"""

from __future__ import annotations

import json
import platform
import re
import tomllib
from argparse import Namespace
from collections.abc import Coroutine, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

from twisted.internet.defer import Deferred
from twisted.python.failure import Failure

from infranetes import config as configuration
from infranetes.config import Config
from infranetes.ctl import archive, bundle_daemon, host, host_programs
from infranetes.ctl.bundle_daemon import word
from infranetes.ctl.bundle_files import Bundle
from infranetes.ctl.secrets.configuration import without_secrets
from infranetes.ctl.secrets.files import secrets_in, secrets_of_files
from infranetes.ctl.session import DONE, Session, config_file
from infranetes_common import config_files
from infranetes_common.concurrency import run_in_thread, settled, within
from infranetes_common.errors import ConfigError

SECONDS = 60.0  # for everything that is gathered at once

_PATH = re.compile(r"""["'](/[^"'\n]+)["']""")  # in a file that is not TOML

Part = Coroutine[Deferred[object], object, object]
"""Makes a text, or what becomes JSON; None: it adds files of its own."""


async def support_bundle(session: Session) -> int:
    """Write the bundle and say where it is.

    :raise FailedPrecondition: the file is there already, or can't be written."""
    path = session.options.file or Path(_default_name())
    with archive.new_file(path) as file:
        bundle = Bundle()
        config = _config(bundle, session.options)
        secrets = await run_in_thread(session.reactor, _add_configuration, bundle, session.options)
        await _gather(bundle, session, _parts(bundle, session, config))
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
    names_of: dict[str, list[str]] = {}
    for name, why in bundle.missing.items():
        names_of.setdefault(why, []).append(name)
    for why, (first, *others) in names_of.items():
        more = f" and {len(others)} more (manifest.json names them)" if others else ""
        session.print(f"without {first}{more}: {why}")


# ---- what is gathered at once


def _parts(bundle: Bundle, session: Session, config: Config) -> Mapping[str, Part]:
    """Return what makes each of the files, by their names."""
    reactor = session.reactor
    return {
        "host.json": run_in_thread(reactor, host.facts, config.state_dir),
        "store.json": run_in_thread(reactor, host.schema, config.state_dir),
        "programs.json": host.programs(reactor),
        "guest-image.json": run_in_thread(reactor, host.guest_image, config.providers),
        "units.txt": host_programs.units(reactor),
        "journal.txt": host_programs.journal(reactor, host_programs.UNIT),
        "journal-guest-image.txt": host_programs.journal(reactor, host_programs.GUEST_UNIT),
        "nftables.txt": host_programs.tables(reactor),
        "status.json": bundle_daemon.status(session, config),
        "metrics.txt": bundle_daemon.metrics(session),
        "pool.json": bundle_daemon.pool(session),
        "orphans.json": bundle_daemon.orphans(session),
        "pods": bundle_daemon.add_pods(session, bundle),
    }


async def _gather(bundle: Bundle, session: Session, parts: Mapping[str, Part]) -> None:
    """Add what is there in time, and note why the rest is not."""
    works = [within(session.reactor, SECONDS, part, name) for name, part in parts.items()]
    for name, result in zip(parts, await settled(works), strict=True):
        if isinstance(result, str):
            bundle.texts[name] = result
        elif isinstance(result, Failure):
            assert isinstance(result.value, Exception)
            bundle.lacks(name, result.value)  # also what is unexpected: the rest is needed all the more
        elif result is not None:
            bundle.documents[name] = result


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
        name, text = f"configuration/{number:02d}-{word(file.name)}.json", ""
        try:
            content = file.read_bytes()
            text = content.decode(errors="replace")  # its secrets are looked for in any case
            table = tomllib.loads(text)
        except (OSError, ValueError, RecursionError) as error:
            bundle.lacks(name, error)
            secrets += secrets_in(text)
            tables.append({"": _PATH.findall(text)})
            continue
        shown = without_secrets(table)
        tables.append(table)
        secrets += shown.secrets
        try:
            content.decode()
        except UnicodeDecodeError as error:
            bundle.lacks(name, error)
        else:
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
