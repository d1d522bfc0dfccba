# SPDX-License-Identifier: Apache-2.0
"""The command that kubelet runs.

It answers with one JSON object, and with nothing else: kubelet reads standard error with it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from infranetes_common import __version__

NAME = "infranetes-flexvolume"
DEFAULT_CONFIG = "/etc/infranetes/infranetes.toml"
DEFAULT_SOCKET = "/run/infranetes/control.sock"
SOCKET_NAME = "control.sock"  # in the run directory
SUCCESS, FAILURE, NOT_SUPPORTED = "Success", "Failure", "Not supported"
MAX_MESSAGE = 2000  # characters
MAX_PATH = 4096

_CAPABILITIES = {
    "attach": False,
    "selinuxRelabel": False,
    "supportsMetrics": False,  # kubelet would measure what is mounted on the node, not the volume
    "fsGroup": False,  # kubelet would set it on the node; it is set in the VM
    "requiresFSResize": True,  # else kubelet reports a volume as enlarged that was not
}
_EPILOG = """\
kubelet runs it as the driver infranetes.io/volume, with one of:
  init
  getvolumename OPTIONS
  mount DIRECTORY OPTIONS
  unmount DIRECTORY
OPTIONS is a JSON object; what may be in it is in docs/flexvolumes.md. All else is
answered with "Not supported".
The answer is one JSON object. The exit status is 0 if it says "Success", else 1.
"""

Answer = dict[str, object]


class Refused(Exception):
    """A request that can't be done; the message says why."""


class Parser(argparse.ArgumentParser):
    """A parser that raises `Refused` for wrong arguments, so that kubelet can read the error."""

    def error(self, message: str) -> NoReturn:
        raise Refused(message)


def parser() -> Parser:
    """Return the parser of the command line."""
    found = Parser(
        prog=NAME,
        description="Has volumes of this node's infranetes daemon mounted in pods, for kubelet.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("--version", action="version", version=f"{NAME} {__version__}")
    found.add_argument(
        "--config", metavar="FILE", help=f"the daemon's configuration (default: {DEFAULT_CONFIG})"
    )
    found.add_argument(
        "--socket", metavar="PATH", help=f"the daemon's socket (default: {SOCKET_NAME} in its run_dir)"
    )
    found.add_argument("call", metavar="CALL", help="what kubelet asks")
    found.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="of what")
    return found


def socket_of(options: argparse.Namespace) -> str:
    """Return the path of the daemon's socket.

    The daemon checks its configuration; of that no more is read here than where the socket is.

    :raise Refused: the configuration can't be read."""
    if options.socket:
        return str(options.socket)
    from infranetes_common import config_files
    from infranetes_common.errors import ConfigError

    path = options.config or DEFAULT_CONFIG
    if not options.config and not os.path.lexists(path):
        return DEFAULT_SOCKET
    try:
        run_dir = config_files.read(path).table.get("run_dir")
    except ConfigError as error:
        raise Refused(str(error)) from None
    if run_dir is None:
        return DEFAULT_SOCKET
    if not isinstance(run_dir, str):
        raise Refused(f"{path}: run_dir is no text")
    return os.path.join(run_dir, SOCKET_NAME)


def _init(options: argparse.Namespace) -> Answer:
    _arguments(options, 0)
    return {"capabilities": _CAPABILITIES}


def _getvolumename(options: argparse.Namespace) -> Answer:
    from infranetes.flexvolume import options as volumes

    (given,) = _arguments(options, 1)
    try:
        return {"volumeName": volumes.name(volumes.read(given))}
    except volumes.InvalidOptions as error:
        raise Refused(str(error)) from None


def _mount(options: argparse.Namespace) -> Answer:
    from infranetes.flexvolume import options as volumes

    directory, given = _arguments(options, 2)
    _check_path(directory)
    try:
        volume = volumes.volume(volumes.read(given))
    except volumes.InvalidOptions as error:
        raise Refused(str(error)) from None
    from infranetes.flexvolume import client

    _ask(client.mount, options, directory, volume)
    return {}


def _unmount(options: argparse.Namespace) -> Answer:
    (directory,) = _arguments(options, 1)
    _check_path(directory)
    from infranetes.flexvolume import client

    _ask(client.unmount, options, directory)
    return {}


_CALLS: Mapping[str, Callable[[argparse.Namespace], Answer]] = {
    "init": _init,
    "getvolumename": _getvolumename,
    "mount": _mount,
    "unmount": _unmount,
}


def _ask(call: Callable[..., None], options: argparse.Namespace, *arguments: object) -> None:
    from infranetes.flexvolume.client import Failed

    try:
        call(socket_of(options), *arguments)
    except Failed as error:
        raise Refused(str(error)) from None


def _arguments(options: argparse.Namespace, count: int) -> list[str]:
    found = [str(each) for each in options.arguments]
    if len(found) != count:
        raise Refused(f"{options.call} takes {count} arguments, not {len(found)}")
    return found


def _check_path(directory: str) -> None:
    if not directory.startswith("/") or len(directory) > MAX_PATH or not directory.isprintable():
        raise Refused(f"{directory[:256]!r} is no absolute path")


def answer(arguments: Sequence[str] | None = None) -> Answer:
    """Do what is asked and return the answer."""
    try:
        options = parser().parse_args(arguments)
        call = _CALLS.get(options.call)
        if call is None:
            return {"status": NOT_SUPPORTED}
        return {"status": SUCCESS, **call(options)}
    except Refused as error:
        return {"status": FAILURE, "message": str(error)[:MAX_MESSAGE]}
    except Exception as error:
        return {"status": FAILURE, "message": f"{NAME}: {type(error).__name__}: {error}"[:MAX_MESSAGE]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(nowhere, 2)  # a library's warning would spoil the answer
    found = answer(arguments)
    print(json.dumps(found))
    return 0 if found["status"] == SUCCESS else 1


if __name__ == "__main__":
    sys.exit(main())
