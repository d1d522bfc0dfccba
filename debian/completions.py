#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write the commands' completions for bash and zsh into a directory, for debian/rules.

They are generated from the parsers; a shell that completes starts Python for names of pods alone.

usage: completions.py DIRECTORY
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from infranetes.ctl import cli as ctl
from infranetes.ctl import completing
from infranetes.publish import command as guest

# Finds what may come next; the same in both shells.
OFFERS = """\
case "$at $before" in
@VALUES@
*)
    case "$at" in
    @WORDS@
    esac
    ;;
esac
"""
# What is completed with names, by how the parser calls it.
NAMES = {
    "POD": completing.PODS,
    "CONTAINER": completing.CONTAINERS,
    "NAMESPACE": completing.NAMESPACES,
    "ANNOTATION": completing.ANNOTATIONS,
}
PARSERS = {"infranetes-ctl": ctl.parser, "infranetes-guest": guest.parser}
BASH = """\
# bash completion of @NAME@, generated from its parser
@FUNCTION@() {
    local at= word offered= files= names= before=${COMP_WORDS[COMP_CWORD-1]} current=${COMP_WORDS[COMP_CWORD]}
    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
        case "$at $word" in
        @COMMANDS@
        esac
    done
    @OFFERS@
    if [ -n "$names" ] && [ "${current#-}" = "$current" ]; then
        offered+=" $(@NAME@ @COMPLETE@ "$names" "$current" "${COMP_WORDS[@]:1:COMP_CWORD-1}" 2>/dev/null)"
    fi
    COMPREPLY=($(compgen -W "$offered" -- "$current"))
    if [ -n "$files" ]; then
        compopt -o filenames
        COMPREPLY+=($(compgen -f -- "$current"))
    fi
}
complete -F @FUNCTION@ @NAME@
"""
ZSH = """\
#compdef @NAME@
# zsh completion of @NAME@, generated from its parser
local at= word offered= files= names= before=${words[CURRENT-1]} nothing=1
for word in ${words[2,CURRENT-1]}; do
    case "$at $word" in
    @COMMANDS@
    esac
done
@OFFERS@
if [ -n "$names" ] && [ "${words[CURRENT]#-}" = "${words[CURRENT]}" ]; then
    offered+=" $(@NAME@ @COMPLETE@ "$names" "${words[CURRENT]}" "${(@)words[2,CURRENT-1]}" 2>/dev/null)"
fi
compadd -- ${=offered} && nothing=0
[ -n "$files" ] && _files && nothing=0
return nothing
"""


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of a parser's commands."""
    actions = parser._actions  # argparse has no public name for them
    found = (each.choices for each in actions if isinstance(each, argparse._SubParsersAction))
    return dict(next(found, {}))


def walk(parser: argparse.ArgumentParser, at: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield this parser and each of its commands' parsers, with the commands that lead there."""
    yield at, parser
    for name, inner in subcommands(parser).items():
        yield from walk(inner, f"{at} {name}".strip())


def offer(action: argparse.Action) -> str:
    """Return the assignment by which the shell offers the values of this option or argument."""
    if action.choices is not None and not isinstance(action, argparse._SubParsersAction):
        return f"offered='{' '.join(map(str, action.choices))}'"
    if name := NAMES.get(str(action.metavar)):
        return f"names='{name}'"
    return "files=1" if action.type is Path else ":"


def commands(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the cases by which a command is found among the words."""
    for at, inner in walk(parser):
        for name in subcommands(inner):
            yield f"'{at} {name}') at='{f'{at} {name}'.strip()}' ;;"


def values(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the cases of options that take a value."""
    for at, inner in walk(parser):
        for action in inner._actions:
            if action.option_strings and action.nargs != 0:
                patterns = "|".join(f"'{at} {flag}'" for flag in action.option_strings)
                yield f"{patterns}) {offer(action)} ;;"


def words(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Yield the cases for all other words: commands, options, and the values of arguments."""
    for at, inner in walk(parser):
        found = [*subcommands(inner)]
        files, names = False, []
        for action in inner._actions:
            found += action.option_strings
            if not action.option_strings and not isinstance(action, argparse._SubParsersAction):
                found += map(str, action.choices or ())
                files = files or action.type is Path
                names += filter(None, [NAMES.get(str(action.metavar))])
        also = (" files=1" if files else "") + (f" names='{','.join(names)}'" if names else "")
        yield f"'{at}') offered='{' '.join(found)}'{also} ;;"


def completion(template: str, name: str, parser: argparse.ArgumentParser) -> str:
    """Return a completion file."""
    blocks = {
        "OFFERS": OFFERS.splitlines(),
        "COMMANDS": commands(parser),
        "VALUES": values(parser),
        "WORDS": words(parser),
    }
    for key, lines in blocks.items():
        ((indented, depth),) = re.findall(rf"^(( *)@{key}@)$", template, flags=re.M)
        template = template.replace(indented, "\n".join(depth + line for line in lines))
    template = template.replace("@COMPLETE@", completing.COMMAND)
    return template.replace("@FUNCTION@", "_" + name.replace("-", "_")).replace("@NAME@", name)


def main() -> None:
    """Write the files bash/NAME and zsh/_NAME."""
    for shell, template, prefix in (("bash", BASH, ""), ("zsh", ZSH, "_")):
        directory = Path(sys.argv[1]) / shell
        directory.mkdir(parents=True, exist_ok=True)
        for name, parser in PARSERS.items():
            text = completion(template, name, parser())
            (directory / f"{prefix}{name}").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
