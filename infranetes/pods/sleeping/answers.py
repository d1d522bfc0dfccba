# SPDX-License-Identifier: Apache-2.0
"""The last good answers to a pod's probes, which the node may repeat while the pod sleeps.

Only answers that pods have given themselves are repeated, for so long as the pod allows. What fails is
not repeated: the pod is woken and asked.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

import attrs

MOST = 32  # answers of one pod: those that were given first are forgotten

A = TypeVar("A")


@attrs.frozen
class _Given(Generic[A]):
    """An answer. :ivar at: when it was given, by the clock."""

    answer: A
    at: float


class Answers(Generic[A]):
    """Answers by the questions that led to them. Pods are meant by their sandboxes' ids."""

    def __init__(self) -> None:
        self._given: dict[str, dict[Hashable, _Given[A]]] = {}

    def put(self, pod: str, question: Hashable, answer: A, now: float) -> None:
        """Remember an answer in place of an earlier one."""
        given = self._given.setdefault(pod, {})
        given.pop(question, None)
        given[question] = _Given(answer, now)
        while len(given) > MOST:
            del given[next(iter(given))]

    def get(self, pod: str, question: Hashable, since: float) -> A | None:
        """Return the answer that was given at `since` or later; None: there is none."""
        given = self._given.get(pod, {}).get(question)
        return given.answer if given is not None and given.at >= since else None

    def has(self, pod: str, question: Hashable) -> bool:
        """Return whether there is an answer, of whatever age: the question has been asked before."""
        return question in self._given.get(pod, {})

    def remove(self, pod: str, question: Hashable) -> None:
        """Forget an answer. Idempotent."""
        self._given.get(pod, {}).pop(question, None)

    def forget(self, pod: str) -> None:
        """Forget all answers of a pod. Idempotent."""
        self._given.pop(pod, None)
