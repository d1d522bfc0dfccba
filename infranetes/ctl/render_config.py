# SPDX-License-Identifier: Apache-2.0
"""The configuration that is in force, as text and as JSON."""

from __future__ import annotations

import argparse
import tomllib
from datetime import UTC, datetime

from infranetes.config.in_force import HIDDEN
from infranetes.config.reading import COMMAND_LINE
from infranetes.ctl.tables import Json, lines, table
from infranetes_common.wire import control

_NANOS = 1e9


def config_json(answer: control.GetConfigResponse, options: argparse.Namespace) -> Json:
    """Return every key. For a secret, `value` is null and `secret` is true."""
    return {
        "files": list(answer.files),
        "reloaded_at": answer.reloaded_at / _NANOS or None,
        "trouble": answer.trouble,
        "keys": [
            {
                "key": each.key,
                **_json(each.in_force),
                "reloaded": each.reloaded,
                "waits": _json(each.waiting) if each.waits else None,
            }
            for each in answer.keys
        ],
    }


def config_text(answer: control.GetConfigResponse, options: argparse.Namespace) -> str:
    """Return a table of the keys, and below it how the last reload went."""
    rows = [
        (each.key, _value(each.in_force), _from(each), _waiting(each) if each.waits else "")
        for each in answer.keys
    ]
    waits = ", ".join(each.key for each in answer.keys if each.waits)
    reloaded = datetime.fromtimestamp(answer.reloaded_at / _NANOS, UTC) if answer.reloaded_at else None
    return lines(
        table(("KEY", "VALUE", "FROM", "AFTER A RESTART"), rows, may_lack=("AFTER A RESTART",)),
        f"Waiting for a restart (systemctl restart infranetes): {waits}" if waits else "",
        f"The configuration was last reloaded at {reloaded:%Y-%m-%d %H:%M:%S} UTC." if reloaded else "",
        f"The last reload did nothing: {answer.trouble}" if answer.trouble else "",
    )


def _json(setting: control.Setting) -> Json:
    origin = setting.origin
    source = "command line" if origin.command_line else "file" if origin.file else "default"
    return {
        "value": tomllib.loads(f"value = {setting.value}")["value"] if setting.value else None,
        "secret": setting.secret,
        "from": source,
        "file": origin.file or None,
        "line": origin.line or None,
    }


def _value(setting: control.Setting) -> str:
    return HIDDEN if setting.secret else setting.value


def _origin(origin: control.Origin) -> str:
    if origin.command_line:
        return COMMAND_LINE
    return f"{origin.file}:{origin.line}" if origin.file else "default"


def _from(key: control.ConfigKey) -> str:
    if not key.HasField("in_force"):
        return ""
    return _origin(key.in_force.origin) + (", by a reload" if key.reloaded else "")


def _waiting(key: control.ConfigKey) -> str:
    if not key.HasField("waiting"):
        return "gone"
    return f"{_value(key.waiting) or 'not given'} ({_origin(key.waiting.origin)})"
