# SPDX-License-Identifier: Apache-2.0
"""The shapes of secrets: what the log, the page, `config show` and the support bundle hide in any text.

Texts may be an agent's or a guest's, and are redacted in the reactor's thread. So the time is in proportion
to the text: words that announce a secret are searched for as they are, and patterns only tried there.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Iterator
from functools import partial

HIDDEN = "(hidden)"
NEAR = 1024  # characters that a cut is moved by at most, to keep words or lines whole
BEFORE = 16 * 1024  # characters before an end in which the beginning of a secret is seen
_BEYOND = 4096  # characters beyond a beginning in which the rest of a secret is seen

Span = tuple[int, int]
"""The beginning and the end of a part of a text."""

# Groups are never repeated possessively here, as in `(...)*+`: Debian 12's Python (3.11.2) would match such
# patterns too short.
_SPACE = re.compile(r"\s")

_OF_KEY = "[A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
_END_KEY = f"-----END {_OF_KEY}"
_NEW_LINES = r"[ \t]*(?:(?:\r?\n|\\+[nr])[ \t]*)+"
_HEADER = r"(?:Proc-Type|DEK-Info|Version|Comment|Hash|Charset|MessageID): [^\r\n\\\"']{0,256}"
_BASE64 = "[A-Za-z0-9+/=]"
PEM_KEY = re.compile(
    rf"-----BEGIN {_OF_KEY}"
    # up to its end
    rf"(?:(?:[^-]|-(?!----(?:BEGIN|END) {_OF_KEY})){{0,65536}}{_END_KEY}"
    # or, where that is missing, headers and lines, whose ends may have become spaces
    rf"|(?:{_NEW_LINES}{_HEADER})*{_BASE64}*(?:{_NEW_LINES}{_BASE64}+|[ \t]+{_BASE64}{{16,}})*"
    rf"(?:(?<={_BASE64}{{16}})[ \t]+{_BASE64}+)?)"
)
"""A private key in PEM, whether its lines end as lines do or as in JSON. Its end may be missing."""

# The rest of a private key whose beginning was cut off.
_CUT_KEY = re.compile(rf"\A[A-Za-z0-9+/=\s\\]*{_END_KEY}")

# A value in quotes, in quotes of JSON within JSON, in single quotes; Python's bytes among them.
_QUOTED = r"""[bru]?(?:"((?:[^"\\]|\\[\s\S])*)|\\"((?:[^"\\]|\\\\(?:\\")?|\\[^"\\])*)|'([^'\n]*))"""

# Before what is hardly a word of a language.
_CREDENTIAL = (
    r"(?=[\w.~+/=-]{8})"
    r"(?=[\w.~+/=-]{20}|[\w.~+/=-]{0,255}(?:[\d+/=]|[._-]\w)|[\w.~+/=-]{1,255}(?-i:[A-Z]))"
)
# Before what is no word of a language, nor an error's code.
_RANDOM = r"(?=[\w.~+/=-]{8})(?=[\w.~+/=-]{0,255}(?:[\d+=]|(?-i:[a-z][A-Z])))"

_OF_HEADER = r"""\\?["']?\s*+:\s*+\[?b?\\?["']?"""
_COOKIE = r"""[^\s"'=;,\]]{1,128}+=(?:\\?"[^"\r\n]*"|[^\s"';,\]]*+)"""

# Patterns by the words (in lower case) that they are tried at. The secret is the last group, or everything.
_SHAPES: tuple[tuple[tuple[str, ...], re.Pattern[str]], ...] = (
    (("-----begin",), PEM_KEY),
    # user, password or token in a URL; an image's digest is none of them
    (("://",), re.compile(r"://([^\s/?#\"'<>]{1,4096})@(?!sha(?:256|512):)")),
    # the same if the password has a slash, as it must not
    (
        ("://",),
        re.compile(r"://(?!\[)([^\s/?#@:\"'<>]{0,64}+:(?!\d+/)[^\s@\"'<>]{1,64}+)@(?!sha(?:256|512):)"),
    ),
    (
        ("bearer", "basic", "negotiate"),
        re.compile(
            r"(?<!\w)(?:bearer|basic|negotiate)[ \t]+"
            rf"(?!realm=|(?:tokens?|authentication|authorization|credentials?)(?![\w.~+/=-])){_CREDENTIAL}"
            r"([\w.~+/=-]+)",
            re.IGNORECASE,
        ),
    ),
    (
        ("authorization",),
        re.compile(
            r"""authorization\\?["']?[ \t]*[:=][ \t]*\[?(?:"""
            r"""\\?["'](?:(?:Bearer|Basic|Digest|Negotiate|Token|AWS4-HMAC-SHA256)[ \t]+)?([^\r\n"'\\]+)"""
            r"""|Digest[ \t]+(\S[^\r\n]*)"""
            r"""|(?:Bearer|Basic|Negotiate|Token|AWS4-HMAC-SHA256)[ \t]+([^\s"'\\][^\r\n"'\\]*)"""
            # within quotes
            r"""|(?:(?<=["']authorization: )|(?<=["']proxy-authorization: ))([^\r\n"'\\]+)(?=\\?["'])"""
            # one word: other words are an error's
            rf"""|({_RANDOM}[^\s"'\\,\]]+)"""
            r"""|([^\s"'\\]{1,1024}+)(?=[ \t]*(?:[\r\n"'\\]|\Z)|[^\s"'\\]))""",
            re.IGNORECASE,
        ),
    ),
    (("eyj",), re.compile(r"(?<![\w-])eyJ[\w-]{10,4096}+\.[\w-]{10,8192}(?:\.[\w-]*)?")),  # a JSON Web Token
    (
        ("ghp_", "gho_", "ghs_", "ghu_", "ghr_", "github_pat_", "glpat-", "dckr_pat_", "ya29.", "aiza"),
        re.compile(r"(?<!\w)(?:gh[opsur]_|github_pat_|glpat-|dckr_pat_|ya29\.|AIza)[\w.-]{16,}"),
    ),
    # headers, also in a client's list of them
    (
        (
            *("x-auth-token", "x-subject-token", "x-vault-token", "x-amz-security-token"),
            "vmware-api-session-id",
        ),
        re.compile(
            rf"(?:x-[a-z]{{3,8}}(?:-security)?-token|vmware-api-session-id){_OF_HEADER}([^\s\"',\]\\]+)",
            re.IGNORECASE,
        ),
    ),
    (
        ("cookie",),
        re.compile(
            rf"cookie{_OF_HEADER}({_COOKIE}(?:;[ \t]*{_COOKIE})*|[^\s\"',\]\\]+)",
            re.IGNORECASE,
        ),
    ),
    # of a signed URL; of Google's API
    (("sig=",), re.compile(r"(?<![a-z])sig=([^\s&\"'<>]+)", re.IGNORECASE)),
    (("?key=", "&key="), re.compile(r"[?&]key=([^\s&\"'<>]+)", re.IGNORECASE)),
)

# The last words of keys whose value is a secret. The nouns may as well be what a sentence is about.
_NOUNS = ("secret", "token", "signature", "credential", "auth")
_WORDS = (
    *("password", "passwd", "passphrase", "pwd", *_NOUNS),
    *("api_key", "api-key", "apikey", "access_key", "access-key", "accesskey", "accountkey"),
    *("secret_key", "secret-key", "secretkey", "private_key", "privatekey", "key-data"),
)
_SIGN = re.compile(r"(\\?[\"'])?[ \t]*+([=:])")
# After such a word: KEY=VALUE, KEY = "VALUE".
_EQUALS = re.compile(rf"[ \t]*+=[ \t]*+{_QUOTED}|=([^\s&\"'<>]+)")
# "KEY": "VALUE", KEY: "VALUE".
_COLON = re.compile(rf"(?:\\?[\"'])?[ \t]*+:[ \t]*+{_QUOTED}")
# "KEY": NUMBER, KEY: NUMBER; before the end of a line or of a pair in a document.
_NUMBER = re.compile(
    r"(?:\\?[\"'][ \t]*+:[ \t]*+|[ \t]*+:[ \t]++)(-?\d[\d.eE+-]{3,64}+)(?=[ \t]*+(?:[,;}\])\r\n]|\Z))"
)
_BARE = r"[^\s\"'<>,;}\])]"
# KEY:VALUE, as Go prints structs and maps. After a noun a port, a version or a tag is none.
_JOINED = re.compile(rf":(?![/:*&({{\[])({_BARE}++)")
_JOINED_TO_NOUN = re.compile(
    rf":(?![/:*&({{\[]|(?:v\d[\w.-]{{0,15}}|\d{{1,5}}|\d+\.[\w.-]*|latest)(?![\w.-]))({_BARE}++)"
)
# KEY: VALUE within a line, where the value is no word of a language; after a noun, not even a host's name.
_WITHIN = re.compile(
    rf"[ \t]*+:[ \t]++(?={_BARE}{{6}})(?={_BARE}{{0,255}}?(?:\d|[a-z][A-Z]))({_BARE}++)(?<!:)"
)
_AFTER_NOUN = re.compile(rf"[ \t]*+:[ \t]++(?=[\w+=]{{20}})(?=[\w+=]{{0,255}}?\d)({_BARE}++)(?<!:)")
_IN_YAML = re.compile(r"[ \t]*(?:- +)*[\w.-]+/[\w.-]*")  # before the last word of a key that has a slash
_OF_SHELL = re.compile(r"(?<![\w-])(?:OLD)?\Z")  # before PWD, which is a directory
_ENDS_OF_WORDS = ("_", ")", "]", '"', "'")  # besides letters and digits
_OF_NAMES = f"{string.ascii_letters}{string.digits}_.-"
# At a line's beginning: KEY = VALUE, KEY: VALUE.
_REST_OF_LINE = re.compile(
    r"[ \t]*+=[ \t]*+([^\s\"'=][^\r\n]*)|:[ \t]++([^\s\"'|>\[{]\S*+)[ \t]*+$", re.MULTILINE
)
_ARGUMENT = re.compile(
    rf"[ \t]++(?!--|(?:is|needs|has|must|was|requires|FILE)(?!\S))(?:{_QUOTED}|([^\s\"'\\]+))"
)
# No secrets: a program's words for nothing, what a parser did not expect, errors of OAuth.
_NO_SECRET = re.compile(
    r"[^\w\s]{0,3}|(?:None|nil|null|true|false)[.,;)\]}]*\s*|(?i:none|null|true|false)"
    r"|invalid_(?:grant|client|request|scope|token)|unauthorized_client|unsupported_grant_type|access_denied"
    r"|(?i:ok|yes|no|on|off|enabled|disabled|required|optional|missing|valid|invalid|expired|revoked|failed|denied)"
)
_LINE_BEGINS = re.compile(r"[ \t]*(?:- +)*[\w.-]*")
_FLAG_BEGINS = re.compile(r"(?<![\w-])--[\w-]*\Z")
_MOST_BEFORE = 80  # characters between the beginning of a line and such a word


def spans(text: str) -> Iterator[Span]:
    """Yield the parts of a text that look like secrets."""
    lower = text.lower()
    if len(lower) != len(text):  # in a few alphabets
        lower = "".join(each.lower() if len(each.lower()) == 1 else each for each in text)
    if "-----end" in lower and (cut := _CUT_KEY.match(text)):
        yield cut.span()
    for words, pattern in _SHAPES:
        for word in filter(lower.__contains__, words):
            yield from _found(word, lower, text, partial(_at, pattern, text))
    for word in filter(lower.__contains__, _WORDS):
        yield from _found(word, lower, text, partial(_value, text))


def _found(
    word: str, lower: str, text: str, match: Callable[[int, int], re.Match[str] | None]
) -> Iterator[Span]:
    """Yield what matches where a word stands. :param match: is given the word's beginning and end."""
    at = lower.find(word)
    while at >= 0:
        end = at + len(word)
        found = match(at, end)
        if found and not _NO_SECRET.fullmatch(text, *found.span(found.lastindex or 0)):
            yield found.span(found.lastindex or 0)
            end = max(end, found.end())
        at = lower.find(word, end)


def _at(pattern: re.Pattern[str], text: str, at: int, end: int) -> re.Match[str] | None:
    return pattern.match(text, at)


def _value(text: str, at: int, end: int) -> re.Match[str] | None:
    """Match the value after a key's last word, which stands at a place in a text."""
    sign = _SIGN.match(text, end)
    before = text[max(at - _MOST_BEFORE, 0) : at]
    if sign is None:
        return _ARGUMENT.match(text, end) if "--" in before and _FLAG_BEGINS.search(before) else None
    if sign[2] == ":":
        if sign[1] is None:
            return _after_colon(text, at, end, before)
        return _COLON.match(text, end) or _NUMBER.match(text, end)
    if text.startswith(("=/", '="/'), end) and text[at:end] == "PWD" and _OF_SHELL.search(before):
        return None
    return _EQUALS.match(text, end) or _rest_of_line(text, end, before)


def _after_colon(text: str, at: int, end: int, before: str) -> re.Match[str] | None:
    """Match the value after a word and a colon. That may be a key's, or what a message is about."""
    quoted = _COLON.match(text, end)
    rest = before.rstrip(_OF_NAMES)
    if rest.endswith("/"):  # a path or an image's name, unless it is a key in YAML
        if quoted is None or not _IN_YAML.fullmatch(before, before.rfind("\n") + 1):
            return None
        return None if _has_words(quoted) else quoted
    # In client_secret and clientSecret it is a key's.
    in_key = before.endswith("_") or (before[-1:].islower() and text[at].isupper())
    if in_key or text[at:end].lower() not in _NOUNS:
        found = quoted or _NUMBER.match(text, end) or _rest_of_line(text, end, before)
        return found or _JOINED.match(text, end) or _WITHIN.match(text, end)
    word = rest.rstrip(" \t")
    in_sentence = len(word) < len(rest) and (word[-1:].isalnum() or word.endswith(_ENDS_OF_WORDS))
    if quoted:
        return None if in_sentence and _has_words(quoted) else quoted
    if rest.endswith(":"):  # within a name with colons
        return None
    found = None if in_sentence else _NUMBER.match(text, end) or _rest_of_line(text, end, before)
    return found or _JOINED_TO_NOUN.match(text, end) or _AFTER_NOUN.match(text, end)


def _has_words(found: re.Match[str]) -> bool:
    """Return whether a value is several words: what a program says, and hardly a secret."""
    return len(found[found.lastindex or 0].split(None, 1)) > 1


def _rest_of_line(text: str, end: int, before: str) -> re.Match[str] | None:
    """Match the rest of the line, as the value of a key at the beginning of that line."""
    begins = _LINE_BEGINS.fullmatch(before, before.rfind("\n") + 1)
    return _REST_OF_LINE.match(text, end) if begins else None


def is_harmless(value: str) -> bool:
    """Return whether a value can't be a secret whatever its key is, as `null` and `disabled`."""
    return _NO_SECRET.fullmatch(value) is not None


def blotted(text: str, parts: Iterable[Span]) -> str:
    """Return a text in which HIDDEN stands for each of the parts, which may overlap."""
    kept: list[str] = []
    end = 0
    for start, stop in sorted(parts):
        if stop <= start:
            continue
        if start >= end:
            kept += [text[end:start], HIDDEN]
        end = max(end, stop)
    return "".join([*kept, text[end:]])


def redacted(text: str) -> str:
    """Return `text` without private keys, credentials, tokens, and the values of keys for secrets."""
    return blotted(text, spans(text))


def redacted_beginning(text: str, most: int) -> str:
    """Return the beginning of a text without secrets, nor the first half of one. It ends with a word's end,
    unless the last word is very long.

    :param most: characters of the text that are kept; only little more of it is looked at."""
    if len(text) <= most:
        return redacted(text)
    *others, last = _SPACE.split(text[most - min(NEAR, most // 4) : most + 1])
    return _part(text, 0, most - len(last[:-1]) if others else most).rstrip()


def redacted_end(text: str, most: int) -> str:
    """Return the end of a text without secrets, nor the second half of one, if that has at most BEFORE
    characters. It begins with a line, or at least a word, unless there is none.

    :param most: characters of the text that are kept; of the rest, only BEFORE characters are looked at."""
    if len(text) <= most:
        return redacted(text)
    begin = len(text) - most
    near = text[begin - 1 : begin + min(NEAR, most // 4)]
    begin += next((at for each in "\n " if (at := near.find(each)) >= 0), 0)
    return _part(text, begin, len(text))


def _part(text: str, begin: int, end: int) -> str:
    """Return a part of a text without secrets, including those of which only some is in it."""
    start = max(begin - BEFORE, 0)
    found = spans(text[start : end + _BEYOND])
    parts = ((max(first + start, begin) - begin, min(last + start, end) - begin) for first, last in found)
    return blotted(text[begin:end], parts)


def end_of(text: str, most: int) -> str:
    """Return the end of a text, in whole lines or at least words: half a secret can't be recognised.

    :param most: characters."""
    if len(text) <= most:
        return text
    end = text[-most:]
    return next((rest for each in "\n\r " if (rest := end.partition(each)[2])), end)
