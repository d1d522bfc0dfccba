# SPDX-License-Identifier: Apache-2.0
"""`kubectl infranetes`: what daemons know of pods, of all nodes, on the machine of a user of the cluster.

Everything of the cluster is asked by kubectl itself, with whatever credentials its user has there. The
daemons get none of these: they are shown a token of a service account that is good for them alone, and for
minutes, which kubectl fetches for those whom the cluster lets have it. What that account may see of pods,
they show.
"""

from __future__ import annotations

import argparse
import base64
import binascii
import http.client
import json
import ssl
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import attrs
from google.protobuf.message import DecodeError, Message

from infranetes.ctl import arguments, render
from infranetes.ctl.calls import names_of_pod
from infranetes.ctl.command_line import CommandLine
from infranetes.ctl.selecting import named, selected
from infranetes.ctl.session import DONE, FAILED, USAGE, written
from infranetes.ctl.top import Top
from infranetes.ctl.view import JSON, TEXT, YAML
from infranetes_common import __version__
from infranetes_common.errors import InfranetesError, NotFound, Unavailable
from infranetes_common.wire import control

PORT = 9475
ACCOUNT, AUDIENCE, VALIDITY = "kube-system/infranetes-viewer", "infranetes", "10m"
KUBECTL_SECONDS, NODE_SECONDS = 60.0, 20.0
AT_ONCE = 32  # nodes that are asked
MAX_ANSWER = 64 << 20
_PORTS = range(1, 65536)
_M = TypeVar("_M", bound=Message)


@attrs.frozen
class Node:
    """A node of the cluster, and the address at which it is asked."""

    name: str
    address: str


_EPILOG = """\
exit status:
  0    done
  1    refused, or a node could not be asked
  2    the command line is wrong
  130  interrupted
"""

Run = Callable[[Sequence[str]], bytes]
"""Runs kubectl with these words; returns its output."""


def parser() -> CommandLine:
    """Return the parser of the command line."""
    top = CommandLine(
        prog="kubectl infranetes",
        description="Shows what the daemons of a cluster's nodes know of pods that are VMs.",
        epilog=_EPILOG,
    )
    top.kinds |= {"describe": True, "console": True}
    _add_shared(top)
    shared = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    _add_shared(shared)
    commands = top.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=argparse.ArgumentParser
    )
    for name, words, add in (
        (
            "pods",
            "list pods of all nodes with their state, and what is wrong with them",
            arguments.pods_of_cluster,
        ),
        ("describe", "tell a pod's life: each step with its time, and its errors", arguments.described),
        ("console", "show what a pod's VM wrote to its console", arguments.described),
        ("top", "list what pods use, the busiest first", arguments.pods_of_cluster),
    ):
        command = commands.add_parser(
            name, parents=[shared], help=words, description=words, allow_abbrev=False
        )
        add(command)
        top.commands[name] = command
    return top


def _add_shared(to: argparse.ArgumentParser) -> None:
    to.add_argument("--version", action="version", version=f"kubectl-infranetes {__version__}")
    to.add_argument("--json", action="store_true", help="answer with JSON")
    to.add_argument("--context", metavar="NAME", help="of the kubeconfig, as kubectl has it")
    to.add_argument("--kubeconfig", type=Path, metavar="FILE", help="as kubectl has it")
    to.add_argument("--node", metavar="NAME", help="ask this node alone")
    words = f"whose token the nodes are shown (default: {ACCOUNT})"
    to.add_argument("--service-account", metavar="NAMESPACE/NAME", default=ACCOUNT, help=words)
    to.add_argument("--audience", default=AUDIENCE, help=f"of the tokens (default: {AUDIENCE})")
    to.add_argument("--port", type=int, choices=_PORTS, metavar="PORT", default=PORT,
                    help=f"at which daemons listen (default: {PORT})")  # fmt: skip
    words = "who signs the daemons' certificates (default: who signs the API server's)"
    to.add_argument("--certificate-authority", type=Path, metavar="FILE", help=words)


def run_kubectl(options: argparse.Namespace) -> Run:
    """Return what runs kubectl for the cluster that the command line means."""
    flags = [f"--context={options.context}"] if options.context else []
    flags += [f"--kubeconfig={options.kubeconfig}"] if options.kubeconfig else []

    def run(words: Sequence[str]) -> bytes:
        try:
            done = subprocess.run(  # noqa: S603
                ["kubectl", *words, *flags],  # noqa: S607 - the one by which this was started
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=False,
                timeout=KUBECTL_SECONDS,
            )
        except FileNotFoundError:
            raise Unavailable("there is no kubectl in PATH, by which the cluster is asked") from None
        except subprocess.TimeoutExpired:
            raise Unavailable(f"kubectl {words[0]} did not end within {KUBECTL_SECONDS:g} s") from None
        if done.returncode:
            raise Unavailable(f"kubectl {words[0]}: {done.stderr.decode(errors='replace').strip()}")
        return done.stdout

    return run


class Cluster:
    """Asks the nodes of a cluster. :param run: runs kubectl."""

    def __init__(self, run: Run, options: argparse.Namespace) -> None:
        self._run = run
        self._options = options
        self._token = ""
        self._tls: ssl.SSLContext | None = None

    def nodes(self) -> list[Node]:
        """Return the nodes, or the one that was named. :raise InfranetesError: kubectl can't tell."""
        only = self._options.node
        listed = _json(self._run(["get", "nodes", *([only] if only else []), "--output=json"]))
        items = [listed] if only else listed.get("items", [])
        return [Node(item["metadata"]["name"], _address(item)) for item in items]

    def namespace(self) -> str:
        """Return the namespace that is meant where none is named."""
        context = _first(self._config().get("contexts")).get("context")
        namespace = context.get("namespace") if isinstance(context, dict) else None
        return namespace if isinstance(namespace, str) else "default"

    def node_of(self, namespace: str, name: str) -> Node:
        """Return the node that a pod is on. :raise NotFound: it is on none."""
        words = ["get", "pod", name, f"--namespace={namespace}", "--output=jsonpath={.spec.nodeName}"]
        node = self._run(words).decode()
        if not node:
            raise NotFound(f"pod {namespace}/{name} is on no node yet: kubectl describe pod {name}")
        item = _json(self._run(["get", "node", node, "--output=json"]))
        return Node(node, _address(item))

    def log_in(self) -> None:
        """Get what all nodes are asked with. :raise InfranetesError: the cluster does not give it."""
        namespace, _, name = self._options.service_account.partition("/")
        words = ["create", "token", name, f"--namespace={namespace}", f"--audience={self._options.audience}"]
        self._token = self._run([*words, f"--duration={VALIDITY}"]).decode().strip()
        authority = self._options.certificate_authority
        try:
            pem = authority.read_text() if authority is not None else self._authority()
            self._tls = ssl.create_default_context(cadata=pem or None)
            # Python 3.13 is stricter than Go's programs, whose certificates may lack identifiers of keys.
            self._tls.verify_flags &= ~ssl.VERIFY_X509_STRICT
        except (OSError, ValueError) as error:
            raise Unavailable(f"the certificate authority can't be used: {error}") from None

    def ask(self, node: Node, path: str, answer: type[_M]) -> _M:
        """Ask a node. :raise InfranetesError: it does not answer, or refuses."""
        assert self._tls is not None
        connection = http.client.HTTPSConnection(
            node.address, self._options.port, timeout=NODE_SECONDS, context=self._tls
        )
        try:
            connection.request("GET", f"/v1/{path}", headers={"Authorization": f"Bearer {self._token}"})
            response = connection.getresponse()
            body = response.read(MAX_ANSWER + 1)
            if response.status != http.client.OK:
                words = " ".join(body[:2000].decode(errors="replace").split())
                raise Unavailable(f"{words or response.reason} ({response.status})")
            if len(body) > MAX_ANSWER:
                raise Unavailable("its answer is too large")
            return answer.FromString(body)
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"{node.address}:{self._options.port} can't be asked: {error}") from None
        except DecodeError:
            raise Unavailable(f"{node.address}:{self._options.port} is no daemon of this release") from None
        finally:
            connection.close()

    def ask_all(self, path: str, answer: type[_M]) -> tuple[dict[str, _M], dict[str, str]]:
        """Ask all nodes at once. Return their answers, and why others did not answer, by their names."""
        nodes = self.nodes()
        self.log_in()
        answers: dict[str, _M] = {}
        troubles: dict[str, str] = {}

        def one(node: Node) -> None:
            try:
                answers[node.name] = self.ask(node, path, answer)
            except InfranetesError as error:
                troubles[node.name] = str(error)

        with ThreadPoolExecutor(AT_ONCE) as threads:
            list(threads.map(one, nodes))
        return answers, troubles

    def _authority(self) -> str:
        cluster = _first(self._config().get("clusters")).get("cluster")
        fields = cluster if isinstance(cluster, dict) else {}
        if data := fields.get("certificate-authority-data"):
            try:
                return base64.b64decode(data, validate=True).decode()
            except (binascii.Error, UnicodeDecodeError) as error:
                raise ValueError(str(error)) from None
        path = fields.get("certificate-authority")
        return Path(path).read_text() if path else ""

    def _config(self) -> Mapping[str, Any]:  # Any: JSON
        return _json(self._run(["config", "view", "--minify", "--flatten", "--output=json"]))


def _json(data: bytes) -> dict[str, Any]:  # Any: JSON
    try:
        document = json.loads(data)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise Unavailable("kubectl's answer is no JSON")
    return document


def _first(items: object) -> dict[str, object]:
    return items[0] if isinstance(items, list) and items and isinstance(items[0], dict) else {}


def _address(node: Mapping[str, Any]) -> str:  # Any: JSON
    """Return a node's address, its own network's if it has one."""
    addresses = {each["type"]: each["address"] for each in node.get("status", {}).get("addresses", [])}
    return next(
        (addresses[kind] for kind in ("InternalIP", "ExternalIP", "Hostname") if kind in addresses), ""
    )


def main(words: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    options = parser().read(sys.argv[1:] if words is None else words)
    options.json = options.json or getattr(options, "form", TEXT) in (JSON, YAML)
    if options.service_account.count("/") != 1:
        print("kubectl infranetes: --service-account is NAMESPACE/NAME", file=sys.stderr)
        return USAGE
    try:
        return carry_out(Cluster(run_kubectl(options), options), options)
    except InfranetesError as error:
        if options.json:
            print(written({"error": str(error)}, options, in_line=True))
        print(f"kubectl infranetes: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return 130


def carry_out(cluster: Cluster, options: argparse.Namespace) -> int:
    """Carry out a command; return the exit status.

    :raise InfranetesError: it can't be carried out at all."""
    if options.command in ("describe", "console"):
        return _one(cluster, options)
    namespace = "" if options.all_namespaces else options.namespace or cluster.namespace()
    options.namespace = None  # the nodes select
    query = f"?namespace={quote(namespace)}" if namespace else ""
    if options.command == "pods":
        answers, troubles = cluster.ask_all(f"pods{query}", control.ListPodsResponse)
        every = control.ListPodsResponse()
        for name, answer in sorted(answers.items()):
            for pod in answer.pods:
                pod.node = name
            every.pods.extend(answer.pods)
        chosen = named(
            list(selected(every.pods, options, lambda pod: pod)), options.names, names_of_pod, "pod"
        )
        _print("pods", control.ListPodsResponse(pods=chosen), options)
    else:
        usage, troubles = cluster.ask_all(f"usage{query}", control.ListUsageResponse)
        top, used = Top(), [pod for _, answer in sorted(usage.items()) for pod in answer.pods]
        top.add(control.ListUsageResponse(pods=named(used, options.names, names_of_pod, "pod")))
        print(written(top.as_json(), options) if options.json else top.as_text(options))
    for name, why in sorted(troubles.items()):
        print(f"kubectl infranetes: node {name}: {why}", file=sys.stderr)
    return FAILED if troubles else DONE


def _one(cluster: Cluster, options: argparse.Namespace) -> int:
    before, _, name = options.pod.removeprefix("pod/").rpartition("/")
    namespace = before or options.namespace or cluster.namespace()
    node = cluster.nodes()[0] if options.node else cluster.node_of(namespace, name)
    cluster.log_in()
    path = f"pods/{quote(namespace, safe='')}/{quote(name, safe='')}"
    if options.command == "console":
        _print("console", cluster.ask(node, f"{path}/console", control.GetConsoleResponse), options)
    else:
        _print("describe", cluster.ask(node, path, control.DescribePodResponse), options)
    return DONE


def _print(command: str, answer: Message, options: argparse.Namespace) -> None:
    if options.json:
        print(written(render.as_json(command, answer, options), options))
    elif text := render.as_text(command, answer, options):
        print(text if command == "pods" else _harmless(text))  # cells of lists are that already


def _harmless(text: str) -> str:
    """Return a node's text without what a terminal would obey: the node may have been taken over."""
    return "".join(each if each.isprintable() or each in "\n\t" else "?" for each in text)


if __name__ == "__main__":
    sys.exit(main())
