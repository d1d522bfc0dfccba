# SPDX-License-Identifier: Apache-2.0
"""An image's files of users and groups, whatever they are made of."""

from __future__ import annotations

from functools import partial

from twisted.trial.unittest import SynchronousTestCase

from infranetes_common.wire import cri
from tests.support.peak import peak
from vmserver.containers.accounts import MAX_FILE_BYTES, Accounts, resolve


class AccountsTests(SynchronousTestCase):
    def test_a_file_of_short_lines_takes_no_more_memory_than_it_is(self) -> None:
        known = b"web:x:1001:1002::/home/web:/bin/sh\n"
        for line in (b"\n", b":\n", b":::\n", b"a:::\n", b"#\n"):
            passwd = line * ((MAX_FILE_BYTES - len(known)) // len(line)) + known
            ask = partial(resolve, cri.LinuxContainerSecurityContext(), Accounts(passwd, passwd, "web"))
            self.assertLess(peak(ask), 1 << 20, line)
            self.assertEqual((ask().uid, ask().gid), (1001, 1002))
