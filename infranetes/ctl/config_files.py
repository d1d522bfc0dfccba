# SPDX-License-Identifier: Apache-2.0
"""`infranetes-ctl config check` and `config default`, which need no daemon."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib import resources

import attrs

from infranetes.config import Config
from infranetes.config.check import Checked, check_file
from infranetes.ctl.arguments import DEFAULT_CONFIG
from infranetes.ctl.session import DONE, USAGE, written
from infranetes.pods.node.handler_config import HandlerConfig
from infranetes.providers import registry
from infranetes_common import config_reference
from infranetes_common.config_faults import Fault
from infranetes_common.config_reference import Table

OWN_TABLES = ("providers", "handlers")  # each name in them has a table of its own
HANDLER = "handlers.example"
_ABOVE = """\
# All keys of infranetes.toml, with their defaults. Those without any are given or left out. Drop-ins in
# infranetes.toml.d/*.toml win over this file. `infranetes-ctl config check` says what is wrong with it.
"""


def default(options: argparse.Namespace) -> int:
    """Print all keys with their defaults; return the exit status."""
    found = list(reference())
    if options.json:
        keys = [
            {
                "key": ".".join(filter(None, (table.name, key.name))),
                "default": key.default,
                "words": key.words,
                "required": key.required,
            }
            for table in found
            for key in table.keys
        ]
        print(written({"keys": keys}, options))
    else:
        print(_ABOVE)
        print("\n".join(config_reference.commented(found)), end="")
    return DONE


def pages() -> str:
    """Return the manual's pages of the configuration, as one text."""
    directory = resources.files("infranetes.config").joinpath("reference")  # links to docs/, or copies
    found = sorted(directory.iterdir(), key=lambda each: each.name)
    return "\n".join(each.read_text(encoding="utf-8") for each in found)


def reference(of_machine: bool = True) -> Iterator[Table]:
    """Yield all tables of infranetes.toml, with those of plug-ins whose keys are known.

    :param of_machine: include defaults that depend on this machine."""
    page = pages()
    yield from config_reference.tables(
        page, "infranetes.toml", Config, without=OWN_TABLES, of_machine=of_machine
    )
    yield from config_reference.tables(page, "handlers.NAME", HandlerConfig, HANDLER)
    for name in registry.names():
        if (cls := registry.settings_class(name)) is not None:
            table = f"providers.{name}"
            try:
                yield from config_reference.tables(page, table, cls, table, of_machine=of_machine)
            except LookupError:  # another project's plug-in, which our page does not describe
                yield from config_reference.tables(f"## {table}\n", table, cls, table)


def check(options: argparse.Namespace) -> int:
    """Print what is wrong with a file and its drop-ins; return the exit status."""
    path = str(options.file or options.config or DEFAULT_CONFIG)
    checked = check_file(path, options.make, options.elsewhere)
    if options.json:
        shown = {
            "files": list(checked.files),
            "faults": [_shown(each) for each in checked.faults],
            "warnings": [_shown(each) for each in checked.warnings],
            "not_looked_at": [_shown(each) for each in checked.unseen],
        }
        print(written(shown, options))
    else:
        print("\n".join(_lines(checked)))
    return USAGE if checked.faults else DONE


def _shown(fault: Fault) -> dict[str, object]:
    return {"file": fault.file, "line": fault.line or None, "key": fault.key or None, "words": fault.words}


def _lines(checked: Checked) -> Iterator[str]:
    """Yield what a person reads: faults first, and the rest once there are none."""
    files = ", ".join(checked.files)
    if checked.faults:
        yield from map(str, checked.faults)
        return
    yield from (str(attrs.evolve(each, words=f"warning: {each.words}")) for each in checked.warnings)
    yield from (str(attrs.evolve(each, words=f"not looked at: {each.words}")) for each in checked.unseen)
    if checked.unseen:
        yield f"the rest of {files} was looked at, and no fault was found"
    elif checked.warnings:
        yield f"the daemon starts with {files}; see the warnings"
    else:
        yield f"nothing is wrong with {files}"
