# SPDX-License-Identifier: Apache-2.0
"""Compare a recording of a real cloud with one of its simulator: name what the simulator lacks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs

from tests.support.clouds.recordings.recording import Recording
from tests.support.clouds.recordings.scrub import EMPTY
from tests.support.clouds.recordings.shapes import pieces, shape
from tests.support.clouds.recordings.states import states
from tests.support.clouds.recordings.wire import Call, Value

# Refusals that any call may get at any time, and which a recording of the simulator therefore need not have.
PASSING = frozenset(("RequestLimitExceeded", "rateLimitExceeded", "userRateLimitExceeded"))
ERROR = "an error"  # stands for an answer's name
_REFUSED = 400


@attrs.frozen
class Outcome:
    """How a call ended. :ivar code: the error's; "": it succeeded."""

    kind: str
    status: int
    code: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.status} {self.code}".rstrip()

    @property
    def may_pass(self) -> bool:
        """Whether it is independent of the request."""
        return self.status >= 500 or self.code in PASSING


def lacking(recorded: Recording, simulated: Recording) -> list[str]:
    """Describe what is in the cloud's recording and not in its simulator's, in a line for each."""
    found = set(_shapes(recorded.calls, simulated.calls))
    if recorded.of_life:
        found.update(_outcomes(recorded.calls, simulated.calls), _states(recorded.calls, simulated.calls))
    return sorted(found)


def _outcomes(recorded: Iterable[Call], simulated: Iterable[Call]) -> Iterator[str]:
    answered = {_outcome(call): call.content_type for call in simulated}
    kinds = {outcome.kind for outcome in answered}
    for call in recorded:
        outcome = _outcome(call)
        if not call.kind or outcome.may_pass:
            continue
        if call.kind not in kinds:
            yield f"{call.kind}: the simulator is not asked"
        elif outcome not in answered:
            yield f"{outcome}: no such answer"
        elif call.content_type != answered[outcome]:
            yield f"{outcome}: {call.content_type or 'neither XML nor JSON'}, not {answered[outcome]}"


def _shapes(recorded: Iterable[Call], simulated: Iterable[Call]) -> Iterator[str]:
    known = _all_shapes(simulated)
    for name, paths in _all_shapes(recorded).items():
        if name not in known:
            continue  # an answer to a request that the simulator does not get
        for path, forms in paths.items():
            where = f"{name}: {path or 'the answer'}"
            parent = path.removesuffix("[]") if path.endswith("[]") else path.rpartition(".")[0]
            if path not in known[name]:
                if parent in known[name] and not known[name][parent] <= {EMPTY}:
                    yield f"{where}: lacking ({_either(forms)})"
                continue
            more = forms - known[name][path] - {EMPTY}
            if more and not known[name][path] <= {EMPTY}:
                yield f"{where}: {_either(more)}, not {_either(known[name][path])}"
            elif more:
                yield f"{where}: always empty ({_either(more)})"


def _all_shapes(calls: Iterable[Call]) -> Mapping[str, Mapping[str, set[str]]]:
    """Return shapes by the names of the structures that have them."""
    found: dict[str, dict[str, set[str]]] = {}
    for call in calls:
        for name, piece in pieces(call.answer):
            of_name = found.setdefault(ERROR if call.status >= _REFUSED else name, {})
            for path, forms in shape(piece).items():
                of_name.setdefault(path, set()).update(forms)
    return found


def _states(recorded: Iterable[Call], simulated: Iterable[Call]) -> Iterator[str]:
    known = states(simulated)
    for kind, of_kind in states(recorded).items():
        if kind not in known:
            yield f"{kind}: shown in no state"
            continue
        for state in of_kind.seen - known[kind].seen:
            yield f"{kind}: never {state}"
        for one, other in of_kind.orders - known[kind].orders:
            if (other, one) in known[kind].orders - of_kind.orders:
                yield f"{kind}: {other} before {one}, not after it"


def _outcome(call: Call) -> Outcome:
    return Outcome(call.kind, call.status, _code(call.answer) if call.status >= _REFUSED else "")


def _code(answer: Value) -> str:
    """Return the code of an error of EC2's or Google's; "": there is none."""
    for path in (("Response", "Errors", "Error", "Code"), ("error", "errors", 0, "reason")):
        found: Value = answer
        for step in path:
            if isinstance(step, str):
                found = found.get(step) if isinstance(found, Mapping) else None
            else:
                found = found[step] if isinstance(found, Sequence) and len(found) > step else None
        if isinstance(found, str):
            return found
    return ""


def _either(forms: Iterable[str]) -> str:
    return " or ".join(sorted(forms))
