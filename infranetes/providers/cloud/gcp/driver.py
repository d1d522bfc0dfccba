"""libcloud's GCE driver, with what it lacks or has wrong.

- Its constructor asks for all zones and regions, which for us is each thread's first act: they are not
  needed, since the names in the configuration are what the API takes.
- Each connection gets a token of its own and keeps it in a file: see `credentials`.
- `create_node` and `destroy_volume` wait for their operation, up to three minutes in which they hold their
  thread; `destroy_node` does so too, or hides the operation; and `create_node` knows neither spot VMs nor
  labels of disks and gives VMs an account that may read storage: the request is made by `ask`, and the
  operation looked at when it is time to.
- `list_nodes` takes no filter, asks for all disks of the project too, and hides that a zone did not answer;
  `list_sizes` ends after the first page: `pages` is used.
- Errors lose their headers, and with them how long to stay away.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from libcloud.common.base import ConnectionUserAndKey
from libcloud.common.google import GoogleBaseError
from libcloud.compute.drivers.gce import API_VERSION, GCEConnection, GCENodeDriver, GCEResponse

from infranetes.providers.cloud.gcp.credentials import Credentials
from infranetes.providers.cloud.interface import CloudError, Trouble

_MAX_PAGES = 1000
_PAGE = 500
_ROOT = f"https://www.googleapis.com/compute/{API_VERSION}/"  # libcloud takes the path of such a URL


class Response(GCEResponse):  # type: ignore[misc]
    """Errors have their headers."""

    def parse_body(self) -> Any:
        try:
            return super().parse_body()
        except GoogleBaseError as error:
            error.headers = self.headers
            raise
        except AttributeError:  # libcloud looks into the code of an error that has none
            raise GoogleBaseError("an error without a code", self.status, None) from None


class Connection(GCEConnection):  # type: ignore[misc]
    """Requests with the token that all threads share."""

    responseCls = Response

    def __init__(
        self,
        user_id: str,
        key: str,
        secure: bool,
        host: str | None = None,
        port: int | None = None,
        *,
        project: str,
        credentials: Credentials,
        **options: Any,
    ) -> None:
        ConnectionUserAndKey.__init__(self, user_id, key, secure=secure, host=host, port=port, **options)
        self.oauth2_credential = credentials
        self.request_path = f"/compute/{API_VERSION}/projects/{project}"
        self.gce_params = None

    def request(self, *args: Any, **options: Any) -> Any:
        try:
            return super().request(*args, **options)
        except GoogleBaseError as error:
            if error.http_code != 401:
                raise
            self.oauth2_credential._thd_forget(self._sent_token)
        return super().request(*args, **options)  # nothing was done: once more, with a new token

    def pre_connect_hook(self, params: Any, headers: Any) -> Any:
        params, headers = super().pre_connect_hook(params, headers)
        self._sent_token = headers["Authorization"].removeprefix("Bearer ")
        return params, headers

    _sent_token = ""


class Driver(GCENodeDriver):  # type: ignore[misc]
    """One thread's."""

    connectionCls = Connection
    connection: Connection

    def __init__(self, project: str, credentials: Credentials, timeout: float, **where: Any) -> None:
        self._credentials = credentials
        super().__init__("-", "-", project=project, timeout=timeout, **where)

    def _ex_connection_class_kwargs(self) -> dict[str, Any]:
        return {"project": self.project, "credentials": self._credentials}

    def ex_list_zones(self) -> list[Any]:
        return []

    def ex_list_regions(self) -> list[Any]:
        return []

    def ask(self, method: str, path: str, params: Any = None, data: Any = None) -> dict[str, Any]:
        """What the API answers.

        :param path: of this project, such as `/zones/Z/instances`; or of any: `projects/P/global/…`."""
        action = path if path.startswith("/") else _ROOT + path
        answer: dict[str, Any] = self.connection.request(
            action, params=params, data=data, method=method, retry_failed=False
        ).object
        return answer

    def find(self, path: str) -> dict[str, Any] | None:
        """A resource; None: there is no such."""
        try:
            return self.ask("GET", path)
        except GoogleBaseError as error:
            if int(error.http_code or 0) == 404:
                return None
            raise

    def pages(self, path: str, **params: Any) -> Iterator[dict[str, Any]]:
        """A list's pages."""
        params["maxResults"] = _PAGE
        for _ in range(_MAX_PAGES):
            page = self.ask("GET", path, params)
            yield page
            if not page.get("nextPageToken"):
                return
            params["pageToken"] = page["nextPageToken"]
        raise CloudError(Trouble.BROKEN, f"the list {path} does not end")

    def everywhere(self, kind: str, filter: str) -> list[dict[str, Any]]:
        """Resources in all zones.

        :raise CloudError: a zone did not answer: what it has is not gone."""
        found: list[dict[str, Any]] = []
        for page in self.pages(f"/aggregated/{kind}", filter=filter):
            scopes: Mapping[str, Any] = page.get("items") or {}
            for name, scope in [*scopes.items(), ("the project", page)]:
                if (scope.get("warning") or {}).get("code") == "UNREACHABLE":
                    raise CloudError(Trouble.PASSING, f"{name} can't be reached by Google itself")
                found += scope.get(kind) or []
        return found
