# SPDX-License-Identifier: Apache-2.0
"""The annotations by which a pod asks for more than the CRI can say, the same for all providers.

A pod is refused, before anything is made for it, if it has an unknown annotation below `infranetes.io/` or a
malformed value. Its provider refuses the annotations that it does not serve. The names of the Go
version are aliases. A test compares the table in docs/annotations.md with this one.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Container, Mapping
from difflib import get_close_matches

import attrs

from infranetes.providers import machine_annotations
from infranetes.providers.annotation_rows import PREFIX, Annotation, boolean, fields, matching
from infranetes.providers.confidential import Confidential
from infranetes.providers.tenants import ANNOTATION
from infranetes_common import bounded_json
from infranetes_common.errors import InvalidArgument
from infranetes_common.quantities import Needs, thousandths, units

__all__ = ["PREFIX", "Annotation"]

CONTAINERS = "containers"  # names the one of CONTAINER_PROVIDERS that runs the pod's containers
CONTAINER_PROVIDERS = ("docker", "oci")
MOST_CPU_MILLIS = 1024 * 1000
LEAST_IDLE = 10.0  # seconds after which an idle pod may sleep
LEAST_MEMORY, MOST_MEMORY = 1 << 20, 64 << 40  # bytes; a smaller number most likely lacks its unit


@attrs.frozen
class Wishes:
    """The requests in a pod's annotations; a field's default means that the pod does not ask."""

    image: str = ""
    instance_type: str = ""
    gpus: int = 0
    spot: bool = False
    spot_fallback: bool = False
    spot_max_price: float | None = None
    confidential: Confidential | None = None
    region: str = ""
    subnet: str = ""
    security_groups: tuple[str, ...] = ()
    public_address: bool | None = None
    elastic_address: str = ""  # "new", or the id of an address
    instance_profile: str = ""
    set_hostname: bool = True
    disk: int = 0  # bytes

    def refuse_others(self, provider: str, served: Container[str]) -> None:
        """Refuse what this provider does not serve.

        :param served: names of this class's fields.
        :raise InvalidArgument: the pod asks for another field; the message names the annotation.
        """
        for field in attrs.fields(Wishes):
            if field.name not in served and getattr(self, field.name) not in (field.default, False):
                name = next(row.name for row in TABLE if row.field == field.name)
                raise InvalidArgument(
                    f"annotation {PREFIX}{name} can't be served: {provider} has nothing like it; "
                    "leave it out, or have the pod scheduled to other nodes"
                )


def _gpus(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,2}", text):
        raise ValueError(text)
    return int(text)


def _price(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,4}(?:\.[0-9]{1,5})?", text) or not float(text):
        raise ValueError(text)
    return float(text)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"([0-9]{1,6})(Mi|Gi|Ti)", text)
    if found is None or not int(found[1]):
        raise ValueError(text)
    return int(found[1]) << {"Mi": 20, "Gi": 30, "Ti": 40}[found[2]]


def _cpu(text: str) -> int:
    millis = thousandths(text)
    if not 0 < millis <= MOST_CPU_MILLIS:
        raise ValueError(text)
    return millis


def _memory(text: str) -> int:
    size = units(text)
    if not LEAST_MEMORY <= size <= MOST_MEMORY:
        raise ValueError(text)
    return size


_WORD = r"[A-Za-z0-9][A-Za-z0-9._/:@+=-]{0,254}"


def _words(text: str) -> tuple[str, ...]:
    return tuple(matching(_WORD)(each.strip()) for each in text.split(","))


def _seconds(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,5}", text) or int(text) > 86400:
        raise ValueError(text)
    return float(text)


def _idle_seconds(text: str) -> float:
    seconds = _seconds(text)
    if seconds < LEAST_IDLE:
        raise ValueError(text)
    return seconds


def _hooks(text: str) -> dict[str, tuple[str, ...]]:
    """Return commands, or signals as one word, by containers' names; "": of all that are not named."""
    hooks = bounded_json.loads(text, 1000) if text.startswith("{") else {"": text}
    return {name: _hook(hook) for name, hook in hooks.items()}


def _hook(said: object) -> tuple[str, ...]:
    if isinstance(said, str) and said in _SIGNALS:
        return (said,)
    words = said if isinstance(said, list) else []
    if not words or words[0] in _SIGNALS or not all(isinstance(each, str) for each in words):
        raise ValueError(said)
    return tuple(words)


_SIGNALS = frozenset(each.name for each in signal.Signals) - {"SIGKILL", "SIGSTOP"}
_HOOK_WORDS = "a signal, or an object of signals and commands by containers' names"
_NAME = r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
_KEPT_NAME = matching(_NAME)
KEPT_WORDS = "a name of up to 63 of a-z, 0-9 and -, with no - at either end"

CPU = Annotation("cpu", "", _cpu, "a number of processors such as 2 or 500m, up to 1024")
MEMORY = Annotation("memory", "", _memory, "a size from 1Mi to 64Ti, such as 8Gi")
NETWORKS = ("vpc", "overlay")
NETWORK = Annotation("network", "", matching("|".join(NETWORKS)), " or ".join(NETWORKS))
TENANT = Annotation(ANNOTATION, "", matching(r"[a-z0-9](?:[-a-z0-9]{0,30}[a-z0-9])?"), "a tenant's name")
START_FROM = Annotation("start-from", "", matching(f"(?:{_NAME}/)?{_NAME}"), "a kept state's name")
MISMATCH = Annotation("start-from-mismatch", "", matching("cold|refuse"), "cold or refuse")
KEEP_AS = Annotation("keep-as", "", _KEPT_NAME, "a kept state's name")
KEEP_AFTER = Annotation("keep-after", "", _seconds, "a number of seconds up to 86400")
KEEP_SECRETS = Annotation("keep-secrets", "", boolean, "true or false")
SLEEP_AFTER = Annotation("sleep-after", "", _idle_seconds, "a number of seconds from 10 to 86400")
SLEEP_PROBES = Annotation("sleep-probes", "", _seconds, "a number of seconds up to 86400")
BEFORE_KEEP = Annotation("before-keep", "", _hooks, _HOOK_WORDS)
AFTER_CLONE = Annotation("after-clone", "", _hooks, _HOOK_WORDS)
CONFIDENTIAL = Annotation("confidential", "confidential", Confidential, "sev-snp or tdx")
SERVICE_PROXY = Annotation("service-proxy", "", boolean, "true or false", ("infranetes.startproxy",))
TABLE = (
    Annotation("image", "image", matching(_WORD), "a machine image's id", ("infranetes.aws.image",)),
    Annotation(
        "instance-type",
        "instance_type",
        matching(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"),
        "a type's name",
        ("infranetes.aws.instancetype",),
    ),
    CPU,
    MEMORY,
    Annotation("gpus", "gpus", _gpus, "a number of GPUs"),
    Annotation("spot", "spot", boolean, "true or false"),
    Annotation("spot-fallback", "spot_fallback", boolean, "true or false"),
    Annotation("spot-max-price", "spot_max_price", _price, "a price of an hour, such as 0.05"),
    CONFIDENTIAL,
    Annotation(
        "region", "region", matching(r"[a-z0-9-]{1,32}"), "a region's name", ("infranetes.aws.region",)
    ),
    Annotation("subnet", "subnet", matching(_WORD), "a subnet's id", ("infranetes.aws.subnet",)),
    Annotation(
        "security-groups",
        "security_groups",
        _words,
        "ids with commas between",
        ("infranetes.aws.securitygroup", "infranetes.aws.securtiygroup"),
    ),
    Annotation("public-address", "public_address", boolean, "true or false"),
    Annotation(
        "elastic-address",
        "elastic_address",
        matching(r"new|[a-z0-9][a-z0-9-]{0,62}"),
        'an address\'s id, or "new"',
        ("infranetes.aws.elasticip",),
    ),
    Annotation(
        "instance-profile",
        "instance_profile",
        matching(_WORD),
        "a profile's name or ARN",
        ("infranetes.aws.iaminstancename",),
    ),
    Annotation(CONTAINERS, "", matching("|".join(CONTAINER_PROVIDERS)), " or ".join(CONTAINER_PROVIDERS)),
    Annotation("disk", "disk", _bytes, "a size such as 40Gi"),
    TENANT,
    Annotation("metadata-access", "", matching("allow|deny"), "allow or deny"),
    Annotation("set-hostname", "set_hostname", boolean, "true or false", ("infranetes.sethostname",)),
    NETWORK,
    SERVICE_PROXY,
    START_FROM,
    MISMATCH,
    KEEP_AS,
    KEEP_AFTER,
    KEEP_SECRETS,
    BEFORE_KEEP,
    AFTER_CLONE,
    SLEEP_AFTER,
    SLEEP_PROBES,
    Annotation("network-interface", "", boolean, "true or false", ("infranetes.createinterface",)),
    Annotation("shared-paths", "", matching(r"[^\0]*"), "paths", ("infranetes.sharedpaths",)),
)

# kubelet copies a pod's annotations to ImageSpec.annotations, for which these are meant, so they are valid on
# pods.
_OF_IMAGES = ("executable-url", "executable-sha256")


def read(annotations: Mapping[str, str]) -> Wishes:
    """Parse a pod's annotations.

    :raise InvalidArgument: a malformed value, an unknown name, or a name and its alias with different
        values. The message names the annotation.
    """
    tables = (*TABLE, *machine_annotations.TABLE)
    known = {row.name for row in tables} | set(_OF_IMAGES)
    for name in annotations:
        if name.startswith(PREFIX) and name.removeprefix(PREFIX) not in known:
            close = get_close_matches(name[:80].removeprefix(PREFIX), sorted(known), n=1)
            meant = f": did you mean {PREFIX}{close[0]}?" if close else ";"
            raise InvalidArgument(
                f"annotation {name[:80]} is not known{meant} those below {PREFIX} are "
                f"{', '.join(sorted(known))}"
            )
    machine_annotations.read(annotations)
    return Wishes(**fields(TABLE, annotations))


def refuse_unknown(provider: str, annotations: Mapping[str, str], supported: Collection[str] = ()) -> None:
    """Refuse what begins with a provider's own prefix, today's or the Go version's, and is not known.

    :param supported: the provider's own annotations, whole names.
    :raise InvalidArgument: the message names the annotation, and what may be meant."""
    prefixes = (f"{provider}.{PREFIX}", f"infranetes.{provider}.")
    names = [*supported, *(name for row in TABLE for name in row.aliases if name.startswith(prefixes))]
    for name in annotations:
        if name.startswith(prefixes) and name not in names:
            close = get_close_matches(name, names, n=1)
            meant = (
                f"; did you mean {close[0]}?" if close else f"; known are {', '.join(names)}" if names else ""
            )
            raise InvalidArgument(f"annotation {name[:80]} is not known to the provider {provider}{meant}")


def refuse(problems: Mapping[str, str]) -> None:
    """Refuse a pod whose annotations have problems. :param problems: by names without the prefix; "": none.

    :raise InvalidArgument: the message has the first problem."""
    for name, problem in problems.items():
        if problem:
            raise InvalidArgument(f"annotation {PREFIX}{name}: {problem}")


def kept_name(what: str, text: str) -> str:
    """Check the name of a kept state. :param what: where it is given, for people.

    :raise InvalidArgument: it can be none."""
    try:
        return _KEPT_NAME(text)
    except ValueError:
        raise InvalidArgument(f"{what} {text[:80]!r}: expected {KEPT_WORDS}") from None


@attrs.frozen
class KeepAs:
    """What a pod asks to be kept as. :ivar after: seconds for which its containers have run by then."""

    name: str
    after: float = 30.0


def keep_as(annotations: Mapping[str, str]) -> KeepAs | None:
    """Return what a pod asks to be kept as; None: it does not.

    :raise InvalidArgument: an annotation about keeping is malformed."""
    keeps_secrets(annotations)
    for row in (BEFORE_KEEP, AFTER_CLONE):
        hooks_of(annotations, row)
    after = KEEP_AFTER.value(PREFIX + KEEP_AFTER.name, annotations.get(PREFIX + KEEP_AFTER.name, "30"))
    name = PREFIX + KEEP_AS.name
    if name not in annotations:
        return None
    assert isinstance(after, float)
    return KeepAs(str(KEEP_AS.value(name, annotations[name])), after)


def sleep_after(annotations: Mapping[str, str]) -> float:
    """Return after how many idle seconds a pod sleeps; 0: never. :raise InvalidArgument: malformed."""
    return _seconds_of(SLEEP_AFTER, annotations)


def sleep_probes(annotations: Mapping[str, str]) -> float:
    """Return for how many seconds the node repeats the last good answers of a pod that sleeps to its probes.

    0: each probe wakes it. :raise InvalidArgument: malformed."""
    return _seconds_of(SLEEP_PROBES, annotations)


def _seconds_of(annotation: Annotation, annotations: Mapping[str, str]) -> float:
    """Return an annotation's seconds; 0: there are none. :raise InvalidArgument: malformed."""
    name = PREFIX + annotation.name
    if name not in annotations:
        return 0.0
    seconds = annotation.value(name, annotations[name])
    assert isinstance(seconds, float)
    return seconds


def keeps_secrets(annotations: Mapping[str, str]) -> bool:
    """Return whether a pod's volumes in memory are kept as they are. :raise InvalidArgument: malformed."""
    name = PREFIX + KEEP_SECRETS.name
    return bool(KEEP_SECRETS.value(name, annotations.get(name, "false")))


def hooks_of(annotations: Mapping[str, str], row: Annotation) -> dict[str, tuple[str, ...]]:
    """Return what containers are told, by their names: a command, or a signal as one word.

    :param row: BEFORE_KEEP or AFTER_CLONE. :raise InvalidArgument: malformed."""
    name = PREFIX + row.name
    if name not in annotations:
        return {}
    hooks = row.value(name, annotations[name])
    assert isinstance(hooks, dict)
    return hooks


@attrs.frozen
class StartFrom:
    """What a pod starts from. :ivar namespace: of the state; "": the pod's own.
    :ivar cold: whether it may start cold in its place."""

    name: str
    namespace: str = ""
    cold: bool = True


def starts_from(annotations: Mapping[str, str], granted: Container[str] = ()) -> StartFrom | None:
    """Return the kept state that a pod starts from; None: it starts from none.

    :param granted: the names of annotations that the configuration sets.
    :raise InvalidArgument: an annotation is malformed, or names a state of another namespace by itself."""
    name = PREFIX + START_FROM.name
    if name not in annotations:
        return None
    namespace, _, state = str(START_FROM.value(name, annotations[name])).rpartition("/")
    if namespace and name not in granted:
        raise InvalidArgument(
            f"annotation {name}: a pod starts from states of its own namespace: give the name alone. Only a "
            "handler can name another namespace's"
        )
    mismatch = MISMATCH.value(PREFIX + MISMATCH.name, annotations.get(PREFIX + MISMATCH.name, "cold"))
    return StartFrom(state, namespace, mismatch == "cold")


def wants_service_proxy(annotations: Mapping[str, str]) -> bool:
    """Return whether a pod reaches Services by its VM's own rules. `read` has accepted the annotations."""
    names = (PREFIX + SERVICE_PROXY.name, *SERVICE_PROXY.aliases)
    return all(boolean(annotations[name].strip()) for name in names if name in annotations)


def confidential(annotations: Mapping[str, str]) -> Confidential | None:
    """Return the technology that a pod wants for its VM's memory; None: none.

    :raise InvalidArgument: malformed."""
    name = PREFIX + CONFIDENTIAL.name
    if name not in annotations:
        return None
    value = CONFIDENTIAL.value(name, annotations[name])
    assert isinstance(value, Confidential)
    return value


def wants_spot(annotations: Mapping[str, str]) -> bool:
    """Return whether a pod with these annotations, which `read` accepts, asks for a spot instance."""
    return boolean(annotations.get(PREFIX + "spot", "false").strip())


def requests(annotations: Mapping[str, str]) -> Needs:
    """Return what a pod requests for all of its containers together.

    :raise InvalidArgument: the annotation is malformed.
    """
    cpu, memory = (
        row.value(PREFIX + row.name, annotations[PREFIX + row.name])
        if PREFIX + row.name in annotations
        else 0
        for row in (CPU, MEMORY)
    )
    assert isinstance(cpu, int) and isinstance(memory, int)
    return Needs(cpu, memory)


def network(annotations: Mapping[str, str]) -> str:
    """Return which of NETWORKS a pod asks for; "": none. :raise InvalidArgument: it asks for another."""
    text = annotations.get(PREFIX + NETWORK.name)
    return "" if text is None else str(NETWORK.value(PREFIX + NETWORK.name, text))
