# SPDX-License-Identifier: Apache-2.0
"""A command line with commands, whose options may stand before or after them."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches

KINDS = ("pod", "pods", "po")  # which kubectl wants before names


class CommandLine(argparse.ArgumentParser):
    """Parses what comes before a command as what comes behind it, as in `--watch pods`.

    :ivar commands: the parsers of the commands, by name. :ivar parts: those of their parts, by both names.
    :ivar hints: of commands that run what follows a `--`: what is added to the error about arguments that
        they do not take, by their names.
    :ivar kinds: commands that take KINDS before names as kubectl does, and whether they need a name.
    """

    def __init__(self, prog: str, description: str, epilog: str) -> None:
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, None, description, epilog, formatter_class=raw, allow_abbrev=False)
        self.commands: dict[str, argparse.ArgumentParser] = {}
        self.parts: dict[tuple[str, str], argparse.ArgumentParser] = {}
        self.hints: dict[str, str] = {}
        self.kinds: dict[str, bool] = {}

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse the words; exit with the usage of the command that was given if they are wrong."""
        given = self.without_kind(self.in_order(words))
        self._check_command(given)
        given, behind = self._without_command(given)
        options, left = self.parse_known_args(given)
        if behind:
            options.words = [*options.words, *behind]
        if left:
            words = f"unrecognized arguments: {' '.join(left)}{self.hints.get(given[0], '')}"
            its = {option for action in self._named(given)._actions for option in action.option_strings}
            self._named(given).error(words + did_you_mean(left[0].partition("=")[0], its))
        return options

    def without_kind(self, words: list[str]) -> list[str]:
        """Return ordered words without the word for a kind, as in `describe pod web`."""
        if not words or words[0] not in self.kinds:
            return words
        places = self._words_alone(words)
        if len(places) > 1 + self.kinds[words[0]] and words[places[1]] in KINDS:
            del words[places[1]]
        return words

    def _without_command(self, words: list[str]) -> tuple[list[str], list[str]]:
        """Return ordered words without the command that is to be run, and that.

        argparse takes no more words for it once an option has come between."""
        if not words or words[0] not in self.hints or "--" not in words or len(self._words_alone(words)) < 2:
            return words, []
        at = words.index("--")
        return words[:at], words[at + 1 :]

    def _check_command(self, words: Sequence[str]) -> None:
        """Exit if there is no such command, with the one that may be meant."""
        places = self._words_alone(words)
        if not places:
            return
        command = words[places[0]]
        if command not in self.commands:
            self.error(f"unknown command {command[:80]!r}{did_you_mean(command, self.commands)}")
        parts = {part for whole, part in self.parts if whole == command}
        if parts and len(places) > 1 and (part := words[places[1]]) not in parts:
            choice = ", ".join(sorted(parts))
            self.commands[command].error(
                f"unknown command {part[:80]!r} of `{command}`{did_you_mean(part, parts)} (it has {choice})"
            )

    def _words_alone(self, words: Sequence[str]) -> list[int]:
        """Return the places of words that are neither options nor values of options, up to `--`."""
        found, place, valued = [], 0, self._valued_options()
        while place < len(words) and words[place] != "--":
            if not words[place].startswith("-"):
                found.append(place)
            place += 2 if words[place] in valued else 1
        return found

    def _valued_options(self) -> set[str]:
        every = [self, *self.commands.values(), *self.parts.values()]
        return {option for each in every for option in _valued(each)}

    def in_order(self, words: Sequence[str]) -> list[str]:
        """Return the words with the command first, as argparse wants them."""
        parts = {name: {part for whole, part in self.parts if whole == name} for name in self.commands}
        return command_first(words, parts, self._valued_options())

    def _named(self, words: Sequence[str]) -> argparse.ArgumentParser:
        """Return the parser of the command that ordered words begin with."""
        name, part = [*words[:2], "", ""][:2]
        return self.parts.get((name, part)) or self.commands.get(name) or self


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Return the end of an error on a word that is not one of `words`; "": no other is like it."""
    alike = get_close_matches(word, sorted(words), n=2, cutoff=0.6)
    return f": did you mean {' or '.join(alike)}?" if alike else ""


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
