"""One picture of the tail as SVG: users from the cheapest to the dearest, and what each costs in a month.

Owns a few lines of drawing; nothing here knows money.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT = 720, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 80, 20, 40, 50
_POINTS = 400


def tail_plot(costs: Sequence[float], lines: Mapping[str, float], *, title: str, unit: str) -> str:
    """costs: one per user, any order, at least one. lines: levels to draw, by name. The y axis is logarithmic."""
    ordered = sorted(costs)
    shown = [v for v in (*ordered, *lines.values()) if v > 0] or [1.0]
    low, high = math.floor(math.log10(min(shown))), math.ceil(math.log10(max(shown)))
    low, high = max(low, high - 6), high if high > low else low + 1

    def x(share: float) -> float:
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        level = (math.log10(max(value, 10.0**low)) - low) / (high - low)
        return _HEIGHT - _BOTTOM - level * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif"'
        f' font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for exponent in range(low, high + 1):
        at = y(10.0**exponent)
        parts.append(f'<path d="M{_LEFT} {at:.1f}H{_WIDTH - _RIGHT}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{10.0**exponent:g} {escape(unit)}</text>'
        )
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(f'<text x="{x(share):.1f}" y="{_HEIGHT - 28}" text-anchor="middle">{share:.0%}</text>')
    parts.append(f'<text x="{x(0.5):.1f}" y="{_HEIGHT - 10}" text-anchor="middle">users, cheapest first</text>')
    count = min(_POINTS, len(ordered))
    last = max(1, count - 1)
    points = [(i / last, ordered[round(i / last * (len(ordered) - 1))]) for i in range(count)]
    path = " ".join(f"{x(share):.1f},{y(value):.1f}" for share, value in points)
    parts.append(f'<polyline points="{path}" fill="none" stroke="#0b62a4" stroke-width="2"/>')
    for i, (name, value) in enumerate(lines.items()):
        parts.append(f'<path d="M{_LEFT} {y(value):.1f}H{_WIDTH - _RIGHT}" stroke="#c0392b" stroke-dasharray="6 4"/>')
        parts.append(f'<text x="{_LEFT + 6 + 220 * i}" y="{y(value) - 5:.1f}" fill="#c0392b">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])
