# SPDX-License-Identifier: Apache-2.0
"""The runtime of the guest's Docker: crun, with the right oom_score_adj. Data only, as in `recipe`.

A process whose score crun is not told inherits that of containerd's shim, which is protected from the
kernel's OOM killer. Docker names no score for a command that is executed in a container, and crun 1.8.1
(Debian 12) ignores a container's score of 0. Such processes would outlive the application, or the agent. So
Docker starts a script instead. It sets its own score to 0, or for a command to that of the container's first
process, and then becomes crun, whose processes inherit it. It starts no other program.

The shim keeps the id of a container's first process in `init.pid`, beside the files of its commands.
"""

from __future__ import annotations

PATH = "/usr/lib/infranetes/crun"
CRUN = "/usr/bin/crun"

_RUNTIME = f"""\
#!/bin/sh
# Docker's runtime: crun. What it begins has the oom_score_adj 0 unless it is told otherwise, and what it
# executes in a container has the container's.
action=
option=
score=0
for word; do
    case "$option" in --pid-file) pid_file=$word ;; esac
    case "$word" in exec) action=exec ;; esac
    option=$word
done
if [ "$action" = exec ]; then
    read -r first <"${{pid_file%/*}}/init.pid"
    read -r score <"/proc/$first/oom_score_adj"
fi 2>/dev/null
echo "${{score:-0}}" >/proc/self/oom_score_adj
exec {CRUN} "$@"
"""

# Files by path: mode and text.
FILES: dict[str, tuple[int, str]] = {PATH.removeprefix("/"): (0o755, _RUNTIME)}
