# SPDX-License-Identifier: Apache-2.0
"""The child process that makes one image: descriptor 0 is the layer, 1 the image. `build` starts it.

Its argument is JSON: compression, diff_id and limits. It ends with one of the codes below, having said why on
its standard error.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import signal
import sys

from infranetes.images.erofs.convert import convert
from infranetes.images.erofs.limits import BAD, FAILED, FULL, BadLayer, Limits

_FIRST_USER = 1_900_010_000  # behind those of QEMU's VMs; no two processes share one
_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Give up rights, then work. Returns the exit code."""
    order = json.loads(sys.argv[1])
    limits = Limits(**order["limits"])
    _give_up_rights(limits)
    try:
        convert(0, 1, order["compression"], order["diff_id"], limits)
    except BadLayer as e:
        return _say(BAD, str(e))
    except MemoryError:
        return _say(BAD, f"it needs more than {limits.memory_bytes} bytes of memory")
    except OSError as e:
        full = e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        return _say(FULL if full else FAILED, os.strerror(e.errno or 0))
    return 0


def _say(code: int, why: str) -> int:
    sys.stderr.write(why)
    return code


def _give_up_rights(limits: Limits) -> None:
    if os.getuid() == 0:
        user = _FIRST_USER + os.getpid()
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)  # takes all capabilities, too
    # After the change of user, which would undo it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    file_bytes = 2 * limits.max_bytes + (1 << 30)
    for what, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 3),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_CPU, 2 * int(limits.seconds) + 1),
    ):
        resource.setrlimit(what, (value, value))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # an error instead


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # its threads may still read
