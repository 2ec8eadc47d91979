"""Which tokens pruning makes harder to predict, and which dropped tokens would have helped them.

    python -m experiments.smollm2.misses MODEL ADAPTER --wikitext FILE --news FILE

Of each file the first articles that are long enough, cut to --tokens. For each article the loss of
every token, pruned and dense (the base model, without adapter), and for the ten tokens that suffer
most, exactly, their loss with dropped tokens brought back. An estimate chooses them, from one
backward pass for each of the ten:

    one_layer   one token in one layer
    all_layers  one token in all layers
    three       three tokens in all layers
    random      one dropped token in all layers, chosen by chance: the control

It resumes where it stopped; rows in docs/results/smollm2_misses.json, and a figure.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.publish import publish
from experiments.smollm2 import common, misses_report
from experiments.smollm2.common import Row
from experiments.smollm2.misses_report import COUNTS
from kvprune import Pruned
from kvprune.adapters.load import load_with_tokenizer
from kvprune.errors import PruneError
from kvprune.evaluate.text_file import read_text
from kvprune.evaluate.throughput.timing import machine, versions
from kvprune.explain import Trace, parts_of_speech
from kvprune.explain.estimate import estimated_change
from kvprune.explain.misses import Trial, promising, verify, worst
from kvprune.explain.token_text import token_kind
from kvprune.utils.malloc import keep_memory
from kvprune.utils.quiet import quiet

TEXTS = ("wikitext", "news")
MOST, TOGETHER = 10, 3
LONGEST = 8  # n-grams are compared up to this length


def main() -> None:
    parser = common.arguments(__doc__)
    for name in TEXTS:
        parser.add_argument(f"--{name}", type=Path, help="articles, two empty lines between them")
    parser.add_argument("--articles", type=int, default=10, help="of each text")
    parser.add_argument("--tokens", type=int, default=1000, help="of each article")
    args = parser.parse_args()
    if len(args.adapters) != 1:
        raise PruneError(f"{len(args.adapters)} adapters were given; pass one")
    quiet()
    keep_memory()
    loaded = load_with_tokenizer(str(args.model), str(args.adapters[0]))
    pruned, tokenizer = loaded.attached(), loaded.tokenizer
    # the same model without its base, but faster
    merged = load_with_tokenizer(str(args.model), str(args.adapters[0]), merge=True).attached()
    adapter = {"adapter": pruned.name, "digest": common.digest(args.adapters[0])}
    points = common.points(args, "misses", tokens=args.tokens, **adapter)
    rows: list[Row] = []
    for text in (name for name in TEXTS if getattr(args, name)):
        found = articles(read_text(getattr(args, text)), tokenizer, args.tokens, args.articles)
        for number, ids in enumerate(found):
            setting = {"text": text, "article": number}
            rows += points.measure(setting, partial(study, pruned, merged, tokenizer, ids, number))
            print(misses_report.line(rows), flush=True)
    about = {"model": str(args.model), **adapter, "tokens": args.tokens, "most": MOST}
    about |= {"counts": list(COUNTS), "machine": machine(), "versions": versions()}
    publish("smollm2_misses", about, rows, args.docs)
    misses_report.show(rows)
    misses_report.draw(rows, args.docs)


def articles(text: str, tokenizer: Any, tokens: int, most: int) -> list[list[int]]:
    """The first articles of at least that many tokens, cut to them."""
    found: list[list[int]] = []
    for article in text.split("\n\n\n"):
        if len(found) < most:
            ids = tokenizer(article.strip(), verbose=False).input_ids
            if len(ids) >= tokens:
                found.append(ids[:tokens])
    if len(found) < most:
        raise PruneError(f"{len(found)} articles have {tokens} tokens, {most} are needed")
    return found


def study(pruned: Pruned, merged: Pruned, tokenizer: Any, ids: list[int], seed: int) -> list[Row]:
    """One row for the article, and one for each of the tokens that suffer most."""
    trace = Trace.from_ids(pruned, tokenizer, ids, votes=False).with_cost()
    kinds = [token_kind(token) for token in trace.tokens]
    speeches = parts_of_speech.tag_tokens(trace.tokens)
    repeats = [repeated(ids, token) for token in range(len(ids))]
    return [
        about_article(trace, kinds, speeches, repeats),
        *(
            {
                **miss, "kind": kinds[miss["token"]], "speech": speeches[miss["token"]],
                "repeated": repeats[miss["token"]],
            }
            for miss in about_misses(trace, merged, np.random.default_rng(seed))
        ),
    ]  # fmt: skip


def about_article(trace: Trace, kinds: list[str], speeches: list[str], repeats: list[int]) -> Row:
    assert trace.loss is not None
    assert trace.dense_loss is not None
    assert trace.open_loss is not None
    costs = {
        "dense": (trace.loss - trace.dense_loss)[1:].astype(float),
        "open": (trace.loss - trace.open_loss)[1:].astype(float),
    }

    def by(classes: list[Any]) -> dict[str, list[float]]:
        """Tokens of each class, and what they cost against the dense model and the open gates."""
        own = np.array([str(name) for name in classes[1:]])
        return {
            str(name): [
                int((own == name).sum()),
                *(float(cost[own == name].sum()) for cost in costs.values()),
            ]
            for name in np.unique(own)
        }

    ten = [set(np.argsort(-cost, kind="stable")[:MOST].tolist()) for cost in costs.values()]
    return {
        "row": "article",
        "title": trace.text.strip().splitlines()[0][:80],
        "tokens": len(trace.ids) - 1,
        "sparsity": float(trace.sparsity[:, -1].mean()),
        "loss": float(np.nansum(trace.loss)),
        "dense_loss": float(np.nansum(trace.dense_loss)),
        "open_loss": float(np.nansum(trace.open_loss)),
        "cost": {name: about_cost(cost) for name, cost in costs.items()},
        "same_ten": len(ten[0] & ten[1]),  # of the most missed by either measure
        "kinds": by(kinds),
        "speeches": by(speeches),
        "repeats": by([min(n, 2) for n in repeats]),
    }


def about_cost(cost: np.ndarray) -> Row:
    """Sums: of all tokens, of those that suffer, of the worst and of the best 1, 2, 3, 5, ..."""
    order = np.sort(cost)
    return {
        "net": float(cost.sum()),
        "suffered": float(cost.clip(min=0).sum()),
        "worst": [float(order[::-1][:count].sum()) for count in COUNTS],
        "best": [float(order[:count].sum()) for count in COUNTS],
    }


def about_misses(trace: Trace, pruned: Pruned, rng: np.random.Generator) -> list[Row]:
    assert trace.loss is not None
    assert trace.dense_loss is not None
    assert trace.open_loss is not None
    targets = worst(trace.loss, trace.dense_loss, MOST)
    trials: dict[int, dict[str, Trial]] = {}
    estimates: dict[int, np.ndarray] = {}
    for target in targets:
        estimate = estimates[target] = estimated_change(pruned, trace.ids, trace.drop_step, target)
        places = promising(estimate, 2 * TOGETHER)
        whole = tuple(place for place in places if place[1] is None)
        single = tuple(place for place in places if place[1] is not None)
        dropped = np.nonzero((trace.drop_step < target).any(0))[0]
        by_chance = ((int(rng.choice(dropped)), None),) if len(dropped) else ()
        chosen = {"one_layer": single[:1], "all_layers": whole[:1], "three": whole}
        trials[target] = {
            name: Trial(target, tried)
            for name, tried in {**chosen, "random": by_chance}.items() if tried
        }  # fmt: skip
    every = {trial for group in trials.values() for trial in group.values()}
    losses = dict(verify(pruned, trace.ids, trace.drop_step, sorted(every, key=str)))
    rows = []
    for target in targets:
        row: Row = {
            "row": "miss", "token": target, "written": trace.tokens[target],
            "after": "".join(trace.tokens[max(0, target - 12) : target]),
            "loss": float(trace.loss[target]), "dense_loss": float(trace.dense_loss[target]),
            "open_loss": float(trace.open_loss[target]),
        }  # fmt: skip
        for name, trial in trials[target].items():
            row[name] = about_return(trace, trial, losses[trial], estimates[target])
        rows.append(row)
    return rows


def about_return(trace: Trace, trial: Trial, loss: float, estimate: np.ndarray) -> Row:
    """The loss with the tokens of the trial back; of its first one, where it is and what it is."""
    token, layer = trial.places[0]
    expected = sum(
        float(estimate[:, token].sum() if layer is None else estimate[layer, token])
        for token, layer in trial.places
    )
    same = {0: trial.target, 1: trial.target - 1}
    return {
        "loss": loss,
        "estimated_change": expected,
        "token": token,
        "layer": None if layer is None else trace.layers[layer],
        "written": trace.tokens[token],
        "distance": trial.target - token,
        "gone_in": int((trace.drop_step[:, token] < trial.target).sum()),  # layers
        # the same text, apart from case and blanks, as the missed token or as the one before it
        "copy_of": next((n for n, other in same.items() if alike(trace, token, other)), None),
    }


def alike(trace: Trace, one: int, other: int) -> bool:
    words = [trace.tokens[token].strip().lower() for token in (one, other)]
    return words[0] == words[1] != ""


def repeated(ids: list[int], token: int) -> int:
    """How long the n-gram that ends here is that the text had before: 0 for a new token."""
    longest = 0
    for end in range(token):
        n = 0
        while n < min(LONGEST, end + 1) and ids[end - n] == ids[token - n]:
            n += 1
        longest = max(longest, n)
    return longest


if __name__ == "__main__":
    main()
