"""The text in a notebook: a small picture of a trace, inline."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from kvprune.ops.never import NEVER

if TYPE_CHECKING:
    from kvprune.explain.trace import Trace


def notebook_summary(trace: Trace, max_tokens: int = 1500) -> str:
    """The text for notebooks: the more layers have dropped a token, the fainter it is."""
    alive = (trace.drop_step == NEVER).mean(0)
    L, T = trace.drop_step.shape
    spans = []
    for i, token in enumerate(trace.tokens[:max_tokens]):
        dropped = round(L * (1 - float(alive[i])))
        note = f"token {i}: dropped in {dropped} of {L} layers"
        opacity = 0.25 + 0.75 * float(alive[i])
        spans.append(
            f'<span style="opacity:{opacity:.2f}" title="{note}">{html.escape(token)}</span>'
        )
    more = f" … and {T - max_tokens} more tokens" if max_tokens < T else ""
    held = float(trace.kept[:, -1].mean())
    return (
        f'<div dir="auto" style="white-space:pre-wrap;line-height:1.7">{"".join(spans)}{more}</div>'
        f'<p style="opacity:.7">{T} tokens × {L} layers; at the end a layer holds '
        f"{held:.0f} tokens ({held / T:.0%}). <code>trace.to_html(path)</code> for the page.</p>"
    )
