# SPDX-License-Identifier: Apache-2.0
"""`infranetes-ctl config check` and `config default`, which need no daemon."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from importlib import resources

from infranetes.config import Config
from infranetes.config_check import check_file
from infranetes.control.arguments import DEFAULT_CONFIG
from infranetes.control.session import DONE, USAGE
from infranetes.handler_config import HandlerConfig
from infranetes.providers import registry
from infranetes_common import config_reference
from infranetes_common.config_reference import Table

PAGE = "configuration.md"  # a copy of docs/configuration.md
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
        print(json.dumps({"keys": keys}, indent=2))
    else:
        print(_ABOVE)
        print("\n".join(config_reference.commented(found)), end="")
    return DONE


def reference(of_machine: bool = True) -> Iterator[Table]:
    """Yield all tables of infranetes.toml, with those of plug-ins whose keys are known.

    :param of_machine: include defaults that depend on this machine."""
    page = resources.files("infranetes").joinpath(PAGE).read_text(encoding="utf-8")
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
    files, faults = check_file(path, options.make)
    if options.json:
        found = [
            {"file": each.file, "line": each.line or None, "key": each.key or None, "words": each.words}
            for each in faults
        ]
        print(json.dumps({"files": list(files), "faults": found}, indent=2))
    elif faults:
        print("\n".join(map(str, faults)))
    else:
        print(f"nothing is wrong with {', '.join(files)}")
    return USAGE if faults else DONE
