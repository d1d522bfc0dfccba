# SPDX-License-Identifier: Apache-2.0
"""Shell scripts around commands in a POSIX guest, for what the agent can't do itself."""

from __future__ import annotations

from collections.abc import Sequence

# Runs a command, and ends when that ends. The agent tells no end as long as a process has its pipes, and that
# may be one which the command has left in the background. So the command has pipes of its own, read by two
# cats; if they are still open two seconds after its end, nobody reads them any more. The command's end and
# the cats' numbers are told through file descriptor 5. What `exec` can't execute, the shell words as it does
# for people, and ends with 127 or 126.
_AROUND = r"""
exec 3>&1 4>&2 6<&0
told=$(
    exec 5>&1
    {
        exec 7>&1
        {
            (exec "$@") <&6 2>&1 >&7 3>&- 4>&- 5>&- 6<&- 7>&-
            echo "ended$?" >&5
        } 2>/dev/null | cat >&4 3>&- 4>&- 5>&- 6<&- 7>&- &
        echo "cat$!" >&5
    } | cat >&3 3>&- 4>&- 5>&- 6<&- &
    echo "cat$!" >&5
)
code=1 cats=
for each in $told; do
    case $each in
    ended*) code=${each#ended} ;;
    *) cats="$cats ${each#cat}" ;;
    esac
done
left=150
while [ "$left" -gt 0 ]; do
    open=
    for each in $cats; do
        read -r _ _ state _ 2>/dev/null <"/proc/$each/stat" && [ "$state" != Z ] && open=1
    done
    [ "$open" ] || exit "$code"
    [ "$left" -gt 100 ] || sleep 0.02 2>/dev/null || { sleep 1; left=$((left - 49)); }
    left=$((left - 1))
done
kill $cats 2>/dev/null
exit "$code"
"""

# Kills all processes of a session, those too that are started meanwhile.
_KILL = r"""
for round in 1 2 3 4 5 6 7 8; do
    found=$(sed -n "s,^\([0-9]*\) (.*) [A-Y] [0-9-]* [0-9-]* $1 .*,\1,p" /proc/[0-9]*/stat 2>/dev/null)
    [ "$found" ] || break
    kill -KILL $found 2>/dev/null
done
kill -KILL "$1" 2>/dev/null
"""

_SHELL = ("/bin/sh", "-c")
_SESSION = "setsid"  # so that the command and all that it starts can be found


def around(command: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return the ways to run a command, best first: each needs less of the guest than the one before."""
    shell = (*_SHELL, _AROUND, "sh", *command)
    return (_SESSION, *shell), shell, tuple(command)


def killing(pid: int, windows: bool) -> tuple[str, ...]:
    """Return the command that kills another one, with what it has started."""
    if windows:
        return ("taskkill", "/T", "/F", "/PID", str(pid))
    return (*_SHELL, _KILL, "sh", str(pid))
