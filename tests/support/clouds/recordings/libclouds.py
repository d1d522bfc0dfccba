# SPDX-License-Identifier: Apache-2.0
"""Answers that real clouds gave when libcloud's own tests were written, as recordings."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from functools import lru_cache

from tests.support.clouds import recorded, wheels
from tests.support.clouds.recordings.recording import Recording, condensed
from tests.support.clouds.recordings.scrub import Scrubber
from tests.support.clouds.recordings.vocabulary import vocabulary
from tests.support.clouds.recordings.wire import AWS, JSON, UNREADABLE, XML, Call, parsed

_EC2 = "libcloud/test/compute/fixtures/ec2/"
_RESPONSE = "Response"  # ends the name of an answer's element, and is all of an error's


@lru_cache
def recording(cloud: str) -> Recording:
    """Return the answers. Their requests and their order are not known."""
    scrubber = Scrubber(vocabulary(cloud))
    return Recording(cloud, [scrubber.call(call) for call in _calls(cloud)], of_life=False)


def _calls(cloud: str) -> Iterator[Call]:
    if cloud != AWS:
        for answer in recorded.answers():
            error = answer.get("error") if isinstance(answer, dict) else None
            status = error.get("code", 200) if isinstance(error, dict) else 200
            yield Call("", None, status, JSON, condensed(answer))
        return
    with zipfile.ZipFile(wheels.wheel(recorded.RELEASE)) as archive:
        for name in archive.namelist():
            if name.startswith(_EC2) and name.endswith(".xml"):
                answer = parsed(archive.read(name), XML)
                if isinstance(answer, dict):
                    root = next(iter(answer))
                    kind = root.removesuffix(_RESPONSE)
                    yield Call(kind, None, 200 if kind else 400, XML, condensed(answer))
                else:
                    assert answer == UNREADABLE, name
