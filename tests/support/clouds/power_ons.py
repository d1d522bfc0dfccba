# SPDX-License-Identifier: Apache-2.0
"""Clones that vCenter could not power on: the VM exists and is off.

The reference does not say whether the clone's task fails then. Here it either fails or succeeds, as a test
chooses.
"""

from __future__ import annotations

import re


class PowerOns:
    """:ivar fail_clones: whether the task of a clone that can't be powered on fails."""

    def __init__(self) -> None:
        self.fail_clones = True
        self._faults: dict[str, str] = {}  # by the clone's task

    def refused(self, task: str, fault: str) -> None:
        """Record a refused power-on. :param fault: the name of vCenter's fault."""
        if self.fail_clones:
            self._faults[task] = fault

    def told(self, answer: bytes) -> bytes:
        """Return an answer in which the tasks of these clones have failed."""
        for task, fault in self._faults.items():
            start = f'<objects><obj type="Task">{task}</obj>'.encode()
            if start in answer:
                whole = re.escape(start) + rb".*?</objects>"
                answer = re.sub(whole, start + _failed(fault), answer, count=1, flags=re.DOTALL)
        return answer


def _failed(fault: str) -> bytes:
    state = '<propSet><name>info.state</name><val xsi:type="TaskInfoState">error</val></propSet>'
    value = f'<fault xsi:type="{fault}"/><localizedMessage>the test\'s {fault}</localizedMessage>'
    error = f'<propSet><name>info.error</name><val xsi:type="LocalizedMethodFault">{value}</val></propSet>'
    return f"{state}{error}</objects>".encode()
