# SPDX-License-Identifier: Apache-2.0
"""`infranetes-ctl screenshot`: what the screen of a pod's VM shows, as PNG."""

from __future__ import annotations

import base64
import json
import os
import stat
import sys
from pathlib import Path

from infranetes.ctl.calls import ASK_SECONDS
from infranetes.ctl.session import DONE, Session
from infranetes.ctl.terminal import Descriptor
from infranetes_common.concurrency import replace_file, run_in_thread
from infranetes_common.errors import InfranetesError, InvalidArgument
from infranetes_common.wire import control

STDOUT = 1
_SIZE_AT = 16  # in a PNG: width and height, of four bytes each


async def screenshot(session: Session) -> int:
    """Write the picture to a file or to standard output.

    :raise GrpcError: the daemon refuses. :raise InfranetesError: it can't be written here."""
    options = session.options
    if options.output is None and not options.json and os.isatty(STDOUT):
        raise InvalidArgument("a picture is nothing for a terminal: give --output FILE, or `>FILE`")
    vm, pieces = control.VmOfPod(), []
    request = control.ScreenshotRequest(pod=options.pod)
    async for answer in session.stub.Screenshot(request, timeout=ASK_SECONDS):
        if answer.HasField("vm"):
            vm = answer.vm
        pieces.append(answer.png)
    png = b"".join(pieces)
    if options.output is not None:
        await run_in_thread(session.reactor, _thd_write, options.output, png)
    if options.json:
        session.print(json.dumps(_document(vm, png, options.output), indent=2))
    elif options.output is None:
        await Descriptor(session.reactor, STDOUT).write(png)
    else:
        width, height = _size(png)
        words = f"{options.output}: {width} x {height}, VM {vm.vm_id} of pod {vm.namespace}/{vm.name}"
        print(words, file=sys.stderr, flush=True)
    return DONE


def _document(vm: control.VmOfPod, png: bytes, output: Path | None) -> dict[str, object]:
    width, height = _size(png)
    return {
        "sandbox_id": vm.sandbox_id,
        "namespace": vm.namespace,
        "name": vm.name,
        "vm_id": vm.vm_id,
        "width": width,
        "height": height,
        "bytes": len(png),
        "file": str(output) if output is not None else None,
        "png": base64.b64encode(png).decode() if output is None else None,
    }


def _size(png: bytes) -> tuple[int, int]:
    at = _SIZE_AT
    return int.from_bytes(png[at : at + 4], "big"), int.from_bytes(png[at + 4 : at + 8], "big")


def _thd_write(path: Path, content: bytes) -> None:
    """Write a file that its owner alone may read, whole or not at all; or into what is there and is no file.

    :raise InfranetesError: it can't be written."""
    try:
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):
            path.write_bytes(content)
        else:
            replace_file(path.resolve(), content)
    except OSError as error:
        raise InfranetesError(f"{path} can't be written: {error.strerror}") from None
