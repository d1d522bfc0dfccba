# SPDX-License-Identifier: Apache-2.0
"""A command line with commands, whose options may stand before or after them."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable, Mapping, Sequence


class CommandLine(argparse.ArgumentParser):
    """Parses what comes before a command as what comes behind it, as in `--watch pods`.

    :ivar commands: the parsers of the commands, by name. :ivar parts: those of their parts, by both names.
    :ivar hints: what is added to the error about arguments that a command does not take, by its name.
    """

    def __init__(self, prog: str, description: str, epilog: str) -> None:
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, None, description, epilog, formatter_class=raw, allow_abbrev=False)
        self.commands: dict[str, argparse.ArgumentParser] = {}
        self.parts: dict[tuple[str, str], argparse.ArgumentParser] = {}
        self.hints: dict[str, str] = {}

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse the words; exit with the usage of the command that was given if they are wrong."""
        given = self.in_order(words)
        options, left = self.parse_known_args(given)
        if left:
            words = f"unrecognized arguments: {' '.join(left)}{self.hints.get(given[0], '')}"
            self._named(given).error(words)
        return options

    def in_order(self, words: Sequence[str]) -> list[str]:
        """Return the words with the command first, as argparse wants them."""
        parts = {name: {part for whole, part in self.parts if whole == name} for name in self.commands}
        every = [self, *self.commands.values(), *self.parts.values()]
        return command_first(words, parts, {option for each in every for option in _valued(each)})

    def _named(self, words: Sequence[str]) -> argparse.ArgumentParser:
        """Return the parser of the command that ordered words begin with."""
        name, part = [*words[:2], "", ""][:2]
        return self.parts.get((name, part)) or self.commands.get(name) or self


def command_first(
    words: Sequence[str], commands: Mapping[str, Collection[str]], valued: Collection[str]
) -> list[str]:
    """Move the command, and the part of it that is named, before the options in front of them.

    :param commands: the names of commands, each with its parts. :param valued: the options that have a value.
    """
    found: list[str] = []
    options: list[str] = []
    choice: Collection[str] = commands
    place = 0
    while place < len(words) and choice and words[place] != "--":
        word = words[place]
        if word.startswith("-"):
            width = 2 if word in valued else 1
            options += words[place : place + width]
            place += width
        elif word in choice:
            found.append(word)
            choice = commands[word] if len(found) == 1 else ()
            place += 1
        else:
            break
    return [*found, *options, *words[place:]]


def _valued(parser: argparse.ArgumentParser) -> Iterable[str]:
    """Yield a parser's options that have a value."""
    for action in parser._actions:
        if action.nargs != 0:
            yield from action.option_strings
