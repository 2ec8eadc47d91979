"""Trace: which token dropped which, as one integer per token and layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvprune.errors import PruneError
from kvprune.explain import trace_file
from kvprune.explain.cache_row import cache_row, model_of_record
from kvprune.explain.cost import Miss, Place
from kvprune.explain.votes import Runners, Votes
from kvprune.ops.timeline import NEVER

if TYPE_CHECKING:
    import pandas
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from kvprune.cache.pruned_cache import PrunedCache
    from kvprune.integration.handle import Pruned

RUNNERS = 3


@dataclass(frozen=True, eq=False)
class Trace:
    """The complete record of one text: when each layer dropped each token, and by which token.

    drop_step[l, j] = i: token i dropped token j in layer l; tokens j ≤ k < i still saw it.
    NEVER: it was kept to the end.
    """

    tokens: tuple[str, ...]  # joined, the text; see token_text.py for characters of several tokens
    ids: tuple[int, ...]
    drop_step: np.ndarray  # (L, T) int32
    layers: tuple[int, ...]  # indices in the model, without the layers that are not pruned
    prompt: int  # number of tokens given; the model generated the others
    kept_bytes: int  # per slot and layer: key, value and all other columns
    dense_bytes: int  # per token and layer: key and value
    model: str = ""
    adapter: str = ""  # its name in the registry, or its folder's
    settings: dict[str, Any] = field(default_factory=dict)  # of the method as in force; dtype
    votes: Votes | None = None  # of a method that votes
    loss: np.ndarray | None = None  # (T,), -log p of each token as pruned; NaN for the first
    dense_loss: np.ndarray | None = None  # (T,), of the dense model; `dense` says which it is
    open_loss: np.ndarray | None = None  # (T,), of the adapter with every gate open
    dense: str = ""  # "base model", or "open gates" where the base's weights are not at hand
    misses: tuple[Miss, ...] = ()  # the tokens that suffered most, the worst first
    # where it came from, for `restore`; not saved
    pruned: Pruned | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        L, T = len(self.layers), len(self.tokens)
        if not T:
            raise PruneError("a trace of no tokens is useless; give it some text")
        step = np.asarray(self.drop_step)
        if step.shape != (L, T) or len(self.ids) != T:
            raise PruneError(
                f"drop_step has shape {step.shape} and there are {len(self.ids)} ids; "
                f"{L} layers and {T} tokens need ({L}, {T}) and {T}"
            )
        if not np.issubdtype(step.dtype, np.integer):
            raise PruneError(f"drop_step holds {step.dtype}; it must hold integers")
        # a step beyond the text was not reached in it
        step = np.where(step < T, step, NEVER).astype(np.int32)
        if (step <= np.arange(T)).any():
            layer, token = np.argwhere(step <= np.arange(T))[0]
            raise PruneError(
                f"token {token} of layer {layer} is dropped at step {step[layer, token]}; "
                f"only a later token can drop it"
            )
        object.__setattr__(self, "drop_step", step)
        for name in ("loss", "dense_loss", "open_loss"):
            loss = getattr(self, name)
            if loss is not None and loss.shape != (T,):
                raise PruneError(f"{name} has shape {loss.shape}; {T} tokens need ({T},)")
        if not isinstance(self.settings, dict):
            raise PruneError(f"settings={self.settings!r} must be a dictionary")
        for miss in self.misses:
            for token, layer in ((miss.token, None), *(back[:2] for back in miss.returns)):
                self.check_place(token, layer)
        if self.votes is not None and self.votes.q_int.shape[:2] != (L, T):
            raise PruneError(
                f"the votes are of {self.votes.q_int.shape[:2]} layers and tokens; the trace has "
                f"({L}, {T})"
            )

    def __getstate__(self) -> dict[str, Any]:
        # a copy of the record, not of the model
        return {**vars(self), "pruned": None}

    @classmethod
    def from_text(
        cls,
        pruned: Pruned,
        tokenizer: PreTrainedTokenizerBase,
        text: str,
        cost: bool = False,
        misses: int = 0,
        progress: bool = False,
    ) -> Trace:
        """Process the text as a prompt and record what each layer drops, and why.

        cost: also the loss of every token, pruned and dense. misses: also the number of tokens to
        explain that suffered most, which takes some seconds each.
        """
        ids = tokenizer(text).input_ids
        if not text or not ids:
            raise PruneError("the text is empty; give the model something to read")
        trace = cls.from_ids(pruned, tokenizer, ids)
        if misses:
            return trace.with_misses(misses, progress=progress)
        return trace.with_cost() if cost else trace

    @classmethod
    def from_ids(
        cls,
        pruned: Pruned,
        tokenizer: PreTrainedTokenizerBase,
        ids: Sequence[int],
        votes: bool = True,
    ) -> Trace:
        """`from_text` for a text that is already tokenised; `votes` take 8 r L bytes a token."""
        from kvprune.cache.pruned_cache import PrunedCache
        from kvprune.explain.measure import origin
        from kvprune.explain.replay import collecting_votes, read
        from kvprune.integration.host import max_positions

        limit = max_positions(pruned.model)
        if limit is not None and len(ids) > limit:
            raise PruneError(
                f"the text has {len(ids)} tokens, but the model has {limit} positions; shorten it"
            )
        cache = PrunedCache(pruned, record=True)
        with collecting_votes(pruned) as found:
            read(pruned, ids, cache)
        arguments = cache_row(cache, 0, list(ids), tokenizer) | origin(pruned)
        return cls(prompt=len(ids), votes=found() if votes else None, **arguments)

    @classmethod
    def from_cache(
        cls,
        cache: PrunedCache,
        tokenizer: PreTrainedTokenizerBase,
        ids: Sequence[int],
        model: str = "",
        pruned: Pruned | None = None,
    ) -> Trace:
        """The record of a cache with one row, created with record=True; `ids`: its tokens.

        With `pruned`, whose cache it is, also the votes.
        """
        arguments = {
            "prompt": len(ids),
            "model": model,
            **cache_row(cache, 0, list(ids), tokenizer),
        }
        return cls(**arguments | model_of_record(arguments, pruned))

    @classmethod
    def from_generate(
        cls,
        out: Any,
        tokenizer: PreTrainedTokenizerBase,
        prompt: Tensor,
        attention_mask: Tensor | None = None,
        pruned: Pruned | None = None,
    ) -> list[Trace]:
        """One trace per row of the output of `generate`, from the record of its cache.

        out = model.generate(prompt, attention_mask=mask, return_dict_in_generate=True,
                             past_key_values=PrunedCache(pruned, record=True))
        The last token was generated but never processed: it drops nothing. Tokens after a row's
        end token are left out. With `pruned`, whose cache it is, also the votes.
        """
        cache, sequences = out.past_key_values, out.sequences
        if getattr(out, "beam_indices", None) is not None or len(cache.drop_step[0]) != len(
            sequences
        ):
            raise PruneError(
                "the beams returned need not be those left in the cache; "
                "trace each text with Trace.from_ids"
            )
        ends = {tokenizer.eos_token_id}
        traces = []
        for row, sequence in enumerate(sequences.tolist()):
            given, written = sequence[: prompt.shape[1]], sequence[prompt.shape[1] :]
            if attention_mask is not None:
                real = attention_mask[row].bool().tolist()
                given = [token for token, is_real in zip(given, real, strict=True) if is_real]
            end = next((i + 1 for i, token in enumerate(written) if token in ends), None)
            ids = given + written[:end]
            arguments = {"prompt": len(given), **cache_row(cache, row, ids, tokenizer)}
            traces.append(cls(**arguments | model_of_record(arguments, pruned)))
        return traces

    @property
    def text(self) -> str:
        return "".join(self.tokens)

    @property
    def kept(self) -> np.ndarray:
        """The number of tokens that each layer holds after token k, including k: (L, T)."""
        L, T = self.drop_step.shape
        drops = np.zeros((L, T), dtype=np.int64)
        rows, columns = np.nonzero(self.drop_step < NEVER)
        np.add.at(drops, (rows, self.drop_step[rows, columns]), 1)
        kept: np.ndarray = np.arange(1, T + 1) - drops.cumsum(1)
        return kept

    @property
    def sparsity(self) -> np.ndarray:
        """The share of the k earlier tokens that token k cannot see, 0 for the first: (L, T)."""
        earlier = np.arange(self.drop_step.shape[1])
        sparsity: np.ndarray = 1 - (self.kept - 1 + (earlier == 0)) / np.maximum(earlier, 1)
        return sparsity

    def visible(self, layer: int) -> np.ndarray:
        """The mask of one layer, by its index in `layers`: (T, T), query × key."""
        k = np.arange(self.drop_step.shape[1])
        visible: np.ndarray = (k <= k[:, None]) & (k[:, None] < self.drop_step[layer])
        return visible

    def dropped_by(self, token: int, layer: int) -> list[int]:
        """The tokens that this one dropped, in the layer with this index in `layers`."""
        dropped: list[int] = np.nonzero(self.drop_step[layer] == token)[0].tolist()
        return dropped

    def scores(self, token: int, layer: int) -> np.ndarray:
        """The scores of all later tokens on this one, NaN for itself and earlier ones: (T,).

        layer: its index in `layers`, as in all methods.
        """
        self.check_place(token, layer)
        return self._votes().scores(token, layer)

    @cached_property
    def score(self) -> np.ndarray:
        """The dropper's score on each dropped token, NaN where there was none: (L, T).

        In a layer tied to those below it can be above the threshold: another layer dropped it.
        """
        return self._votes().of_drops(self.drop_step)

    @property
    def margin(self) -> np.ndarray:
        """threshold - score: how clear each drop was, NaN where there was none: (L, T)."""
        margin: np.ndarray = self._votes().threshold - self.score
        return margin

    def runners_up(self, token: int, layer: int, most: int = RUNNERS) -> list[int]:
        """The first later tokens that would have dropped it too, after the one that did."""
        self.check_place(token, layer)
        scores, votes = self.scores(token, layer), self._votes()
        voter = np.arange(len(scores))
        with np.errstate(invalid="ignore"):
            drops = (scores <= votes.threshold) & votes.counts(token, voter)
        after = drops & (voter > self.drop_step[layer, token])
        first: list[int] = np.nonzero(after)[0][:most].tolist()
        return first

    @cached_property
    def runners(self) -> Runners:
        """`runners_up` of every token and layer."""
        return self._votes().runners_up(self.drop_step, RUNNERS)

    @property
    def runner_steps(self) -> np.ndarray:
        """The runners-up of every token, NEVER for none: (L, T, 3)."""
        return self.runners.steps

    @property
    def runner_scores(self) -> np.ndarray:
        """Their scores, NaN for none: (L, T, 3)."""
        return self.runners.scores

    def with_cost(self, pruned: Pruned | None = None) -> Trace:
        """The same with `loss`, `dense_loss` and `open_loss`: three forward passes."""
        from kvprune.explain import measure

        return measure.with_cost(self, pruned)

    def with_misses(
        self,
        most: int = 10,
        tries: int = 4,
        pruned: Pruned | None = None,
        progress: bool = False,
    ) -> Trace:
        """The same with the losses and `misses`: the tokens that suffered most, and why.

        For each, as many returns of dropped tokens as `tries` are tried, those that a backward
        pass favours: half of them in all layers at once, half in a single layer.
        """
        from kvprune.explain import measure

        return measure.with_misses(self, most, tries, pruned, progress)

    def restore(
        self, token: int, layer: int | None = None, pruned: Pruned | None = None
    ) -> np.ndarray:
        """The loss of every token, had this one not been dropped in that layer: (T,).

        layer: its index in `layers`; None: all of them. Every other decision is as recorded, so a
        token that was not dropped changes nothing. `pruned`: the model, for a trace from a file.
        """
        return self.restore_all([(token, layer)], pruned)

    def restore_all(self, places: Sequence[Place], pruned: Pruned | None = None) -> np.ndarray:
        """`restore` for several at once, each (token, layer or None); for none, the loss as is."""
        from kvprune.explain import measure

        return measure.restore(self, places, pruned)

    def _votes(self) -> Votes:
        if self.votes is None:
            method = self.settings.get("method", "this method")
            raise PruneError(
                f"the trace has no votes: {method} does not vote, or they were not recorded; "
                f"trace the text with Trace.from_text(pruned, tokenizer, text)"
            )
        return self.votes

    def check_place(self, token: int, layer: int | None) -> None:
        """Raise if the trace has no such token, or no layer with this index."""
        L, T = self.drop_step.shape
        if not 0 <= token < T:
            raise PruneError(f"token {token} is not in the text; it has tokens 0 to {T - 1}")
        if layer is not None and not 0 <= layer < L:
            raise PruneError(
                f"layer {layer} is not in the trace; 0 to {L - 1} stand for the pruned layers "
                f"{', '.join(map(str, self.layers))} of the model"
            )

    def to_pandas(self) -> pandas.DataFrame:
        """One row per layer and token; drop_step and dropper are missing if it stayed."""
        from kvprune.explain.table import to_pandas

        return to_pandas(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; the step of a token that stays is -1, and NaN is None."""
        return trace_file.to_plain(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Trace:
        return cls(**trace_file.from_plain(values))

    def save(self, path: str | Path) -> Path:
        """Write it as .json or .npz, chosen by the suffix; votes are rounded to float16."""
        return trace_file.save(self, Path(path))

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read what `save` wrote; to restore tokens, pass the model as `pruned`."""
        arguments = trace_file.load(Path(path))
        try:
            return cls(**arguments)
        except TypeError as error:
            raise PruneError(f"{path} is not a trace or is damaged: {error}") from error

    def to_html(self, path: str | Path, title: str = "", against: Trace | None = None) -> Path:
        """Write the page to explore it, one self-contained file; with `against`, of both.

        `against`: a trace of the same text with another adapter or other settings.
        """
        from kvprune.explain.page import write_page

        return write_page(self, path, title, against)

    def _repr_html_(self) -> str:
        from kvprune.explain.page import notebook_summary

        return notebook_summary(self)

    def __repr__(self) -> str:
        L, T = self.drop_step.shape
        gone = self.sparsity[:, -1].mean()
        return f"Trace({T} tokens, {L} layers, {gone:.0%} of the context dropped at the end)"
