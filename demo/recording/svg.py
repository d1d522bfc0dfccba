# SPDX-License-Identifier: Apache-2.0
"""A recording as an animated SVG: one text element for what each line showed.

Nothing runs in it: rules of CSS show and hide the lines, so that it moves where a page has it as an image
too. Where nothing moves, because a program knows no animations or its user wants none, it shows the end. It
takes the page's mode, light or dark, and moves three times, then it stays at the end.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

import attrs

from demo.recording.cast import Cast
from demo.recording.screen import Shown, shown

LETTER, LINE, MARGIN, BAR = 8.0, 19.0, 18.0, 38.0
TIMES = 3
REST = 5.0  # seconds for which the end is looked at, each time
PROMPT = "$ "

STYLE = """
  text { font: 13.2px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: #1f2328; }
  text { white-space: pre; }
  .back { fill: #f6f8fa; stroke: #d1d9e0; }
  .bar { fill: #eaeef2; }
  .title { text-anchor: middle; fill: #59636e; }
  .ok { fill: #1a7f37; font-weight: bold; }
  .bad { fill: #d1242f; font-weight: bold; }
  .faint { fill: #59636e; }
  .said { fill: #0550ae; }
  .gone { visibility: hidden; }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc; }
    .back { fill: #0d1117; stroke: #3d444d; }
    .bar { fill: #212830; }
    .title, .faint { fill: #9198a1; }
    .ok { fill: #3fb950; }
    .bad { fill: #f85149; }
    .said { fill: #79c0ff; }
  }
"""
_STEP = re.compile(r"^  (ok|!!|·) {1,2}(.*?)(\s+[\d.]+ s)?$")


@attrs.define
class _Times:
    """The rules by which lines appear and go. :ivar whole: seconds of one showing."""

    whole: float
    _names: dict[tuple[str, str], str] = attrs.field(factory=dict)

    def name(self, each: Shown) -> str:
        """Return the class of lines that are there as long as this one."""
        begin, end = self._share(each.begin), "" if each.end is None else self._share(each.end)
        return self._names.setdefault((begin, end), f"t{len(self._names)}")

    def _share(self, at: float) -> str:
        return f"{100 * at / self.whole:.2f}".rstrip("0").rstrip(".")

    def rules(self) -> str:
        """Return the rules, which hold only for those who like motion."""
        found = []
        for (begin, end), name in self._names.items():
            hidden = f"0%{{visibility:hidden}}{begin}%{{visibility:visible}}"
            gone = f"{end}%{{visibility:hidden}}" if end else ""
            found.append(f"    @keyframes {name}{{{hidden}{gone}}}")
            found.append(f"    .{name}{{animation:{name} {self.whole:.2f}s step-end {TIMES}}}")
        return "\n".join(["  @media (prefers-reduced-motion: no-preference) {", *found, "  }"])


def drawn(cast: Cast) -> str:
    """Return the picture."""
    lines = [each for each in shown(cast) if each.end is None or each.end - each.begin > 0.0]
    height = 1 + max((each.row for each in lines), default=0)
    times = _Times(cast.seconds + REST)
    wide, tall = cast.columns * LETTER + 2 * MARGIN, BAR + (height + 1) * LINE + 2 * MARGIN
    bar = f"M1,{BAR:.0f} V9 a8,8 0 0 1 8,-8 H{wide - 9:.0f} a8,8 0 0 1 8,8 V{BAR:.0f} Z"
    texts = [_line(each, times.name(each)) for each in lines]
    title = f"{cast.command}: Infranetes {cast.release}, {cast.taken_on}"
    described = "\n".join(each.text for each in lines if each.end is None)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:.0f} {tall:.0f}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<desc>{escape(described)}</desc>",
        f"<style>{STYLE}{times.rules()}\n</style>",
        f'<rect class="back" x="0.5" y="0.5" width="{wide - 1:.0f}" height="{tall - 1:.0f}" rx="8"/>',
        f'<path class="bar" d="{bar}"/>',
        f'<text class="title" x="{wide / 2:.0f}" y="{BAR / 2 + 5:.0f}">{escape(title)}</text>',
        _text(0, (("faint", PROMPT), ("", cast.command))),
        *texts,
        "</svg>",
        "",
    ]
    return "\n".join(parts)


def _line(each: Shown, name: str) -> str:
    """Return what a line showed. Without motion only what it shows at the end is seen."""
    classes = name if each.end is None else f"{name} gone"
    return _text(each.row + 1, _spans(each.text), classes)


def _text(row: int, spans: Sequence[tuple[str, str]], classes: str = "") -> str:
    y = BAR + MARGIN + LINE * row + 13
    inner = "".join(
        f'<tspan class="{kind}">{escape(words)}</tspan>' if kind else escape(words) for kind, words in spans
    )
    length = sum(len(words) for _, words in spans) * LETTER
    of = f' class="{classes}"' if classes else ""
    at = f'x="{MARGIN:.0f}" y="{y:.0f}" textLength="{length:.0f}"'
    return f'<text{of} {at} xml:space="preserve">{inner}</text>'


def _spans(text: str) -> list[tuple[str, str]]:
    """Return a line of the demo's as pieces with their kinds."""
    if found := _STEP.match(text):
        mark, words, took = found[1], found[2], found[3] or ""
        kind = {"ok": "ok", "!!": "bad"}.get(mark, "faint")
        return [(kind, f"  {mark}"), ("", text[found.end(1) : found.start(2)] + words), ("faint", took)]
    quoted = re.match(r"^     ([|$]) ", text)
    if quoted:
        kind = "said" if quoted[1] == "|" else ""
        return [("faint", text[:7]), (kind, text[7:])]
    return [("faint" if text.startswith("     ") else "", text)]
