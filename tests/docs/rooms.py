# SPDX-License-Identifier: Apache-2.0
"""Draws docs/rooms.svg: the rooms of both daemons on floors, and the arrows of their imports.

    python -m tests.docs.rooms            draws it
    python -m tests.docs.rooms --check    fails if the one that is there is not of this tree

An arrow that follows from others is left out: if a imports b and b imports c, a may import c as well. A room
is on the lowest floor that is above all rooms that it imports.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from html import escape

import attrs

from tests.harness.imports import TREE, modules

PICTURE = TREE / "docs" / "rooms.svg"
SPLIT = ("infranetes.machines", "infranetes.pods", "infranetes.providers")  # whose inner rooms are drawn
WHOLE = ("infranetes_common", "infranetes_simulation", "txgrpc")
BOX_HEIGHT, FLOOR_HEIGHT, GAP, MARGIN, LETTER = 26, 74, 14, 12, 7.3
SWEEPS = 24

Graph = Mapping[str, frozenset[str]]

STYLE = """
  text { font: 12px ui-monospace, monospace; fill: #1f2328; text-anchor: middle; }
  rect { fill: #ddf4ff; stroke: #54aeff; }
  .pods { fill: #dafbe1; stroke: #4ac26b; }
  .providers, .machines { fill: #fff8c5; stroke: #d4a72c; }
  .whole, .vmserver { fill: #eaeef2; stroke: #8c959f; }
  .vmserver { stroke-dasharray: 4 2; }
  path { fill: none; stroke: #8c959f; stroke-width: 1.1; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    rect { fill: #0c2d6b; stroke: #388bfd; }
    .pods { fill: #033a16; stroke: #2ea043; }
    .providers, .machines { fill: #3b2300; stroke: #bb8009; }
    .whole, .vmserver { fill: #21262d; stroke: #6e7681; }
    path { stroke: #6e7681; }
  }
"""


def room_of(module: str) -> str:
    """Return the room that a module is drawn in; "": none."""
    parts = module.split(".")
    if parts[0] in WHOLE:
        return parts[0]
    top = ".".join(parts[:2])
    inner = TREE.joinpath(*parts[:3])
    return (
        ".".join(parts[:3])
        if top in SPLIT and len(parts) > 2 and inner.is_dir()
        else top
        if parts[1:]
        else ""
    )


def graph_of(imports: Mapping[str, Iterable[str]]) -> Graph:
    """Return by room the rooms that its modules import. :param imports: by module, what it imports."""
    arrows: dict[str, set[str]] = {}
    for module, names in imports.items():
        if not (room := room_of(module)):
            continue
        arrows.setdefault(room, set())
        for name in names:
            known = name if name in imports else name.rpartition(".")[0]
            if known in imports and (other := room_of(known)) not in ("", room):
                arrows[room].add(other)
    return {room: frozenset(others) for room, others in sorted(arrows.items())}


def below(graph: Graph, room: str) -> frozenset[str]:
    """Return all rooms that a room imports, also through others."""
    found: set[str] = set()
    looking = [room]
    while looking:
        for other in graph[looking.pop()] - found:
            found.add(other)
            looking.append(other)
    return frozenset(found)


def reduced(graph: Graph) -> Graph:
    """Return the graph without the arrows that follow from others. It has no circle."""
    reach = {room: below(graph, room) for room in graph}
    return {
        room: frozenset(one for one in others if not any(one in reach[other] for other in others - {one}))
        for room, others in graph.items()
    }


def floors_of(graph: Graph) -> list[list[str]]:
    """Return the rooms floor by floor, the lowest first; arrows lead down, and cross as little as is easy."""
    floor: dict[str, int] = {}

    def place(room: str) -> int:
        if room not in floor:
            floor[room] = 1 + max((place(other) for other in sorted(graph[room])), default=-1)
        return floor[room]

    for room in sorted(graph):
        place(room)
    floors = [
        [room for room in sorted(graph) if floor[room] == number] for number in range(max(floor.values()) + 1)
    ]
    above: dict[str, set[str]] = {room: {one for one in graph if room in graph[one]} for room in graph}
    for sweep in range(SWEEPS):
        neighbours = graph if sweep % 2 else above
        where = {room: (index + 0.5) / len(rooms) for rooms in floors for index, room in enumerate(rooms)}
        for rooms in floors:
            middle = {
                room: sum(where[one] for one in neighbours[room]) / len(neighbours[room])
                if neighbours[room] else where[room]
                for room in rooms
            }  # fmt: skip
            rooms.sort(key=lambda room: (middle[room], room))
    return floors


@attrs.frozen
class Box:
    """A room's place in the picture, in pixels."""

    room: str
    x: float
    y: float
    width: float

    @property
    def middle(self) -> float:
        return self.x + self.width / 2


def label(room: str) -> str:
    """Return what is written in a room's box."""
    return room.removeprefix("infranetes.").replace(".", "/")


def boxes_of(floors: Sequence[Sequence[str]]) -> tuple[dict[str, Box], float]:
    """Return each room's box, and the picture's width."""
    widths = {room: len(label(room)) * LETTER + 16 for rooms in floors for room in rooms}
    whole = max(sum(widths[room] + GAP for room in rooms) - GAP for rooms in floors)
    boxes = {}
    for number, rooms in enumerate(reversed(floors)):
        free = whole - sum(widths[room] for room in rooms)
        space = free / (len(rooms) + 1)
        x = MARGIN + space
        for room in rooms:
            boxes[room] = Box(room, round(x, 1), MARGIN + number * FLOOR_HEIGHT, widths[room])
            x += widths[room] + space
    return boxes, whole + 2 * MARGIN


def drawn(graph: Graph) -> str:
    """Return the picture of a graph."""
    arrows = reduced(graph)
    floors = floors_of(arrows)
    boxes, width = boxes_of(floors)
    height = 2 * MARGIN + (len(floors) - 1) * FLOOR_HEIGHT + BOX_HEIGHT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img">',
        "<title>The rooms of Infranetes</title>",
        "<desc>Each box is a package; an arrow leads down to a package that it imports.</desc>",
        f"<style>{STYLE}</style>",
        '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0,1 L7,4 L0,7"/></marker>',
    ]
    for room, others in arrows.items():
        lines += [_arrow(boxes[room], boxes[other]) for other in sorted(others)]
    for room, box in sorted(boxes.items()):
        kind = "whole" if room in WHOLE else label(room).partition("/")[0]
        lines.append(
            f'<rect class="{kind}" x="{box.x:.1f}" y="{box.y}" width="{box.width:.1f}" '
            f'height="{BOX_HEIGHT}" rx="4"/>'
            f'<text x="{box.middle:.1f}" y="{box.y + 17}">{escape(label(room))}</text>'
        )
    return "\n".join([*lines, "</svg>", ""])


def _arrow(upper: Box, lower: Box) -> str:
    top, bottom = upper.y + BOX_HEIGHT, lower.y
    bend = min((bottom - top) / 2, 60)
    return (
        f'<path marker-end="url(#head)" d="M{upper.middle:.1f},{top} C{upper.middle:.1f},{top + bend:.1f} '
        f'{lower.middle:.1f},{bottom - bend:.1f} {lower.middle:.1f},{bottom}"/>'
    )


def main(arguments: Sequence[str]) -> int:
    """Draw the picture, or check it; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.docs.rooms", description="Draws docs/rooms.svg.")
    parser.add_argument("--check", action="store_true", help="fail if the picture is not of this tree")
    text = drawn(graph_of(modules()))
    if not parser.parse_args(arguments).check:
        PICTURE.write_text(text)
    elif not PICTURE.exists() or PICTURE.read_text() != text:
        print(
            "docs/rooms.svg is not of this tree: draw it again by python -m tests.docs.rooms", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
