# SPDX-License-Identifier: Apache-2.0
"""The child process that makes one image: descriptor 0 is the layer, 1 the image. `build` starts it.

Its argument is JSON: compression, diff_id and limits. It ends with one of the codes below, having said why on
its standard error.
"""

from __future__ import annotations

import errno
import json
import os
import sys

from infranetes.images.erofs import sandbox
from infranetes.images.erofs.convert import convert
from infranetes.images.erofs.limits import BAD, FAILED, FULL, BadLayer, Limits


def main() -> int:
    """Give up rights, then work. Returns the exit code."""
    order = json.loads(sys.argv[1])
    limits = Limits(**order["limits"])
    sandbox.enter(limits)
    try:
        convert(0, 1, order["compression"], order["diff_id"], limits)
    except BadLayer as e:
        return _say(BAD, str(e))
    except MemoryError:
        return _say(BAD, f"it needs more than {limits.memory_bytes} bytes of memory")
    except OSError as e:
        full = e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        return _say(FULL if full else FAILED, os.strerror(e.errno or 0))
    except Exception as e:  # a fault of this program: its traceback would show nothing of the cause
        return _say(FAILED, f"unexpected {type(e).__name__}: {e}")
    return 0


def _say(code: int, why: str) -> int:
    sys.stderr.write(why)
    return code


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # its threads may still read
