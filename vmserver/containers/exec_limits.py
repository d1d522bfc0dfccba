# SPDX-License-Identifier: Apache-2.0
"""The kernel's limits for what a program is executed with (execve(2), "Limits on size of arguments").

A program beyond them fails only after its container has been started, and says so in no more than the
container's log. So it is refused before.
"""

from __future__ import annotations

import resource
from collections.abc import Iterable, Sequence

from infranetes_common.errors import InvalidArgument

STRING_BYTES = 32 * resource.getpagesize()
"""The most that one argument or variable may have, with its name and the NUL at its end: MAX_ARG_STRLEN."""

_LEAST, _MOST = 128 << 10, 6 << 20  # bytes that the limit of the stack allows at least and at most
_POINTER = 8
_ADVICE = "give it in a file or on the standard input"


def check_executable(command: Sequence[str], environment: Iterable[str]) -> None:
    """Check that the kernel executes `command` with this environment.

    :param environment: NAME=VALUE each.
    :raise InvalidArgument: one of them is too long, or all together are; says which and the limit.
    """
    arguments, variables = list(map(_size, command)), [(each, _size(each)) for each in environment]
    for index, size in enumerate(arguments):
        if size > STRING_BYTES:
            raise InvalidArgument(
                f"argument list too long: argument {index} of the command has {size - 1} bytes, and the "
                f"kernel takes at most {STRING_BYTES - 1}; {_ADVICE}"
            )
    for text, size in variables:
        if size > STRING_BYTES:
            raise InvalidArgument(
                f"argument list too long: the environment variable {text.partition('=')[0][:80]} has "
                f"{size - 1} bytes with its name, and the kernel takes at most {STRING_BYTES - 1}; {_ADVICE}"
            )
    sizes = [*arguments, *(size for _, size in variables)]
    total, most = sum(sizes) + _POINTER * len(sizes) + sum(arguments[:1]), _total()
    if total > most:
        raise InvalidArgument(
            f"argument list too long: the command and its environment have {total} bytes, and the kernel "
            f"takes at most {most}, a quarter of the limit of the stack; {_ADVICE}"
        )


def _size(text: str) -> int:
    return len(text.encode(errors="surrogateescape")) + 1


def _total() -> int:
    """Return how many bytes all strings and their pointers may have. Containers have this process's limit."""
    stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
    return _MOST if stack == resource.RLIM_INFINITY else min(max(stack // 4, _LEAST), _MOST)
