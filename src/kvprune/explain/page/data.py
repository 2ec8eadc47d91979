"""What the page knows: the text once, and one record per trace of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvprune.errors import PruneError
from kvprune.explain.page.packing import pack_steps, quantise
from kvprune.explain.token_text import KINDS, token_kind
from kvprune.ops.never import NEVER

if TYPE_CHECKING:
    from kvprune.explain.cost import Miss
    from kvprune.explain.trace import Trace

# finer than what is shown, with two decimals
SCORE_STEP, LOSS_STEP = 0.02, 0.005
WORST = 12
LOSSES = ("loss", "dense_loss", "open_loss")
# settings of training, which do not bear on what was dropped here
UNSHOWN = frozenset({"method", "alpha", "beta", "gate", "rank"})


def page_data(trace: Trace, against: Trace | None = None) -> dict[str, Any]:
    """Everything but the scores of all pairs, which `page_scores` fits into what is left."""
    traces = [trace] if against is None else [trace, against]
    if against is not None:
        check_same_text(trace, against)
    records = [record(each) for each in traces]
    for values, name in zip(records, names(traces), strict=True):
        values["name"] = name
    return {**text_data(trace), "layers": list(trace.layers), "records": records}


def text_data(trace: Trace) -> dict[str, Any]:
    """The tokens, with the kind and part of speech of each."""
    from kvprune.explain import parts_of_speech

    tags = parts_of_speech.tag_tokens(trace.tokens) if parts_of_speech.available() else []
    return {
        "tokens": list(trace.tokens),
        "prompt": trace.prompt,
        "kinds": list(KINDS),
        "kind": [KINDS.index(token_kind(token)) for token in trace.tokens],
        "speeches": list(parts_of_speech.PARTS) if tags else [],
        "speech": [parts_of_speech.PARTS.index(tag) for tag in tags],
    }


def record(trace: Trace) -> dict[str, Any]:
    """One trace: when it dropped what, why, and at what cost, as far as it was recorded."""
    T = len(trace.tokens)
    values: dict[str, Any] = {
        "model": trace.model,
        "adapter": trace.adapter,
        "method": trace.settings.get("method", ""),
        "settings": {k: v for k, v in trace.settings.items() if k not in UNSHOWN},
        "kept_bytes": trace.kept_bytes,
        "dense_bytes": trace.dense_bytes,
        "drop": pack_steps(trace.drop_step, np.arange(T), NEVER),
        "dense": trace.dense,
        "misses": misses(trace),
    }
    if trace.votes is not None:
        votes = trace.votes
        rules = ("threshold", "protect_first", "protect_recent")
        values |= {name: getattr(votes, name) for name in rules}
        before = np.concatenate([trace.drop_step[..., None], trace.runner_steps[..., :-1]], -1)
        values["score"] = quantise(trace.score, SCORE_STEP)
        values["runner_gap"] = pack_steps(trace.runner_steps, before, NEVER)
        values["runner_score"] = quantise(trace.runner_scores, SCORE_STEP)
    for name in LOSSES:
        if getattr(trace, name) is not None:
            values[name] = quantise(getattr(trace, name), LOSS_STEP)
    return values


def misses(trace: Trace) -> list[dict[str, Any]]:
    """The tokens that suffered most: those that were explained, then further ones.

    returns: [token, layer or null, loss] of the dropped tokens that were brought back; null if
    none was tried.
    """
    explained = {miss.token: miss for miss in trace.misses}
    further: list[int] = []
    if trace.loss is not None and trace.dense_loss is not None:
        cost = np.nan_to_num(trace.loss - trace.dense_loss, nan=0.0)
        order = np.argsort(-cost, kind="stable")[:WORST]
        further = [int(i) for i in order if cost[i] > 0 and int(i) not in explained]
    rows = []
    for token in [*explained, *further[: WORST - len(explained)]]:
        miss = explained.get(token)
        returns = miss and [[b.token, b.layer, round(float(b.loss), 3)] for b in miss.returns]
        rows.append({"token": token, "returns": returns, **_losses(trace, token, miss)})
    return rows


def _losses(trace: Trace, token: int, miss: Miss | None) -> dict[str, float | None]:
    """Of one token, from its Miss if there is one: a trace need not have the arrays."""

    def one(name: str) -> float | None:
        values = getattr(trace, name)
        value = getattr(miss, name) if miss else None if values is None else values[token]
        return None if value is None else round(float(value), 3)

    return {name: one(name) for name in LOSSES}


def names(traces: list[Trace]) -> list[str]:
    """What to call each trace: its adapter or model, and the settings in which they differ."""
    plain = [trace.adapter or trace.model or "the model" for trace in traces]
    if len(set(plain)) == len(plain):
        return plain
    keys = [
        key for key in traces[0].settings if len({str(t.settings.get(key)) for t in traces}) > 1
    ]
    different = [
        ", ".join([name, *(f"{key} {_brief(trace.settings.get(key))}" for key in keys)])
        for name, trace in zip(plain, traces, strict=True)
    ]
    if len(set(different)) == len(different):
        return different
    return [f"{name} ({letter})" for name, letter in zip(plain, "AB", strict=False)]


def _brief(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def check_same_text(trace: Trace, against: Trace) -> None:
    if trace.ids != against.ids or trace.tokens != against.tokens:
        first = next(
            (i for i, (a, b) in enumerate(zip(trace.ids, against.ids, strict=False)) if a != b),
            min(len(trace.ids), len(against.ids)),
        )
        raise PruneError(
            f"the two traces are of different texts: {len(trace.ids)} and {len(against.ids)} "
            f"tokens, different from token {first} on; trace the same ids with Trace.from_ids"
        )
    if trace.layers != against.layers:
        raise PruneError(
            f"the two traces have different layers, {list(trace.layers)} and "
            f"{list(against.layers)}; a page shows two traces of the same layers"
        )
