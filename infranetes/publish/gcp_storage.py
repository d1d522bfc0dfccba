# SPDX-License-Identifier: Apache-2.0
"""Objects of Cloud Storage, which images are imported from.

libcloud's driver for it speaks Amazon's dialect, which has other keys and no resumable uploads, and Google's
own library is not in Debian 12. So requests, which libcloud stands on, sends the four kinds that are needed.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO, TypedDict
from urllib.parse import quote

import requests

from infranetes.providers.cloud.gcp.credentials import SCOPE, Credentials
from infranetes.providers.cloud.interface import CloudError, ErrorKind
from infranetes.publish.interface import Report
from infranetes.publish.journal import Journal
from infranetes.publish.progress import UploadProgress
from infranetes.publish.resumable import Outcome, ResumableUpload
from infranetes_common.errors import (
    FailedPrecondition,
    InfranetesError,
    InvalidArgument,
    PermissionDenied,
    Unavailable,
)

ENDPOINT = "https://storage.googleapis.com"
SCOPES = f"{SCOPE} https://www.googleapis.com/auth/devstorage.read_write"  # of a publisher
_TRIES = 8
_MAX_MESSAGE = 400


class StoredObject(TypedDict, total=False):
    """The fields of an object's description that are used here."""

    md5Hash: str


class Storage:
    """A client for one bucket."""

    def __init__(
        self,
        bucket: str,
        credentials: Credentials,
        endpoint: str = "",
        timeout: float = 60.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.bucket = bucket
        self._credentials = credentials
        self._endpoint = endpoint.rstrip("/") or ENDPOINT
        self._timeout, self._sleep = timeout, sleep
        self._session = requests.Session()
        self._session.trust_env = False  # no passwords from ~/.netrc

    def close(self) -> None:
        """Close the connections."""
        self._session.close()

    def find(self, name: str) -> StoredObject | None:
        """Return an object's description; None: there is none."""
        answer = self._request("GET", self._path(name))
        if answer.status_code == 404:
            self._check_bucket(answer)
            return None
        found: StoredObject = self._accepted(answer).json()
        return found

    def delete(self, name: str) -> None:
        """Delete an object. Idempotent."""
        answer = self._request("DELETE", self._path(name))
        if answer.status_code != 404:
            self._accepted(answer)

    def upload(self, file: Path, name: str, journal: Journal, report: Report) -> None:
        """Make a file an object. Goes on with the session in the journal, if it is still there."""
        upload = ResumableUpload(file.stat().st_size)
        session = journal.target.place if journal.target is not None else ""
        outcome = self._ask(session, upload) if session else Outcome.GONE
        if outcome is Outcome.GONE:
            session = self._begin(name, upload.size)
            journal.placed(session)
            outcome = Outcome.GO_ON
        where = f"gs://{self.bucket}/{name}"
        progress = UploadProgress(f"upload to {where}", upload.size, report, upload.kept)
        with file.open("rb") as content:
            while outcome is not Outcome.DONE:
                before = upload.kept
                outcome = self._send(session, upload, content)
                if outcome is Outcome.GONE:
                    raise Unavailable(f"the upload to {where} has expired: run the command again")
                progress.add(upload.kept - before)

    def _begin(self, name: str, size: int) -> str:
        bucket, name = quote(self.bucket, safe=""), quote(name, safe="")
        path = f"/upload/storage/v1/b/{bucket}/o?uploadType=resumable&name={name}"
        answer = self._request("POST", path, {"X-Upload-Content-Length": str(size)}, b"{}")
        self._check_bucket(answer)
        return str(self._accepted(answer).headers["Location"])

    def _ask(self, session: str, upload: ResumableUpload) -> Outcome:
        """Ask how much of an upload is kept."""
        answer = self._request("PUT", session, upload.question())
        outcome = upload.answered(answer.status_code, answer.headers)
        if outcome is Outcome.REFUSED:
            raise self._refusal(answer)
        return outcome

    def _send(self, session: str, upload: ResumableUpload, content: BinaryIO) -> Outcome:
        """Send a part. After a failure that passes, ask what is kept."""
        begin, length = upload.next_range()
        content.seek(begin)
        data = content.read(length)
        for attempt in range(_TRIES):
            try:
                answer = self._once("PUT", session, upload.headers(), data)
                outcome = upload.answered(answer.status_code, answer.headers)
                if outcome is Outcome.REFUSED:
                    raise self._refusal(answer)
                if outcome is not Outcome.AGAIN:
                    return outcome
                failure = str(self._refusal(answer))
            except (requests.RequestException, CloudError) as error:
                failure = _passing(error)
            self._sleep(min(2.0**attempt, 32.0))
            outcome = self._ask(session, upload)
            if outcome is not Outcome.GO_ON or upload.kept != begin:
                return outcome
        raise Unavailable(f"Cloud Storage accepts no data: {failure}; run the command again, which goes on")

    def _request(
        self, method: str, where: str, headers: Mapping[str, str] | None = None, body: bytes = b""
    ) -> requests.Response:
        """Send a request that may be repeated, and is after failures that pass."""
        url = where if where.startswith("http") else self._endpoint + where
        for attempt in range(_TRIES):
            try:
                answer = self._once(
                    method, url, {"Content-Type": "application/json", **(headers or {})}, body
                )
                if answer.status_code == 401 and attempt == 0:
                    self._credentials._thd_forget(self._credentials.access_token)
                    continue
                if answer.status_code < 500 and answer.status_code not in (408, 429):
                    return answer
                failure = str(self._refusal(answer))
            except (requests.RequestException, CloudError) as error:
                failure = _passing(error)
            self._sleep(min(2.0**attempt, 32.0))
        raise Unavailable(f"Cloud Storage does not answer: {failure}; run the command again")

    def _once(self, method: str, url: str, headers: Mapping[str, str], body: bytes) -> requests.Response:
        bearer = {"Authorization": f"Bearer {self._credentials.access_token}"}
        answer: requests.Response = self._session.request(
            method,
            url,
            data=body,
            headers={**headers, **bearer},
            timeout=self._timeout,
            allow_redirects=False,
        )
        return answer

    def _path(self, name: str) -> str:
        return f"/storage/v1/b/{quote(self.bucket, safe='')}/o/{quote(name, safe='')}"

    def _check_bucket(self, answer: requests.Response) -> None:
        """:raise InvalidArgument: it is the bucket that does not exist."""
        if answer.status_code == 404 and "bucket" in answer.text.lower():
            raise InvalidArgument(
                f"there is no bucket {self.bucket}: make one (`gcloud storage buckets create "
                f"gs://{self.bucket}`), or name another with --bucket"
            )

    def _accepted(self, answer: requests.Response) -> requests.Response:
        if answer.status_code >= 300:
            raise self._refusal(answer)
        return answer

    def _refusal(self, answer: requests.Response) -> InfranetesError:
        try:
            message = str(answer.json()["error"]["message"])
        except (ValueError, KeyError, TypeError):
            message = answer.text
        words = f"gs://{self.bucket}: {answer.status_code}: {' '.join(message.split())[:_MAX_MESSAGE]}"
        if answer.status_code == 403:
            return PermissionDenied(
                f"{words}; give the publisher roles/storage.objectUser on the bucket, and, on an instance "
                f"of Compute Engine, the scope cloud-platform"
            )
        if answer.status_code == 401:
            return FailedPrecondition(f"{words}; look at the credentials")
        return InfranetesError(words)


def _passing(error: requests.RequestException | CloudError) -> str:
    """Return the words of a failure that may pass. :raise CloudError: it is one of credentials that won't."""
    if isinstance(error, CloudError) and error.kind is not ErrorKind.TRANSIENT:
        raise error
    return str(error)[:_MAX_MESSAGE]


def md5_of(file: Path) -> str:
    """Return the MD5 of a file, as Cloud Storage tells that of objects."""
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, lambda: hashlib.md5(usedforsecurity=False))
        return base64.b64encode(digest.digest()).decode()
