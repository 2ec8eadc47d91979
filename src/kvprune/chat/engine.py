"""Chat: the tokens of a conversation, the cache that has read them, and streamed answers."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from kvprune.cache.nbytes import nbytes
from kvprune.cache.pruned_cache import PrunedCache
from kvprune.chat import saved
from kvprune.chat.caches import Caches
from kvprune.chat.sampling import Sampler
from kvprune.chat.template import Message, Template, end_tokens
from kvprune.errors import BudgetError, PruneError
from kvprune.integration.handle import Pruned
from kvprune.integration.host import max_positions
from kvprune.integration.unwrap import unwrap

if TYPE_CHECKING:
    from kvprune.explain import Trace

log = logging.getLogger(__name__)

# tokens per forward pass: a stop takes effect between chunks, and memory stays bounded
CHUNK = 256


@dataclass(frozen=True)
class Status:
    """The state of a conversation after an answer."""

    seen: int  # tokens that the cache has read
    kept: float  # tokens held per layer, mean over layers
    bytes: int
    dense_bytes: int
    tokens: int = 0  # of the last answer
    tokens_per_second: float = 0.0  # of generation only, without reading the prompt
    ended: str = ""  # "end": by the model itself; "length": at its limit; "stopped"


class Chat:
    """A conversation with a model, pruned or dense, on one cache.

        chat = Chat(pruned, tokenizer)
        for piece in chat.say("Who are you?"):
            print(piece, end="")

    Only the new part of each turn is read. If a template writes earlier turns differently than they
    were read (some omit earlier thinking), `tell` gets a message and the cache is rebuilt.
    `compiled`: answers by a compiled model, which takes a minute to make.
    `kv` and `budget` are those of `PrunedCache`. What a budget refuses ends the answer, or, if not
    even the message fits, is as if it had not been said.
    """

    def __init__(
        self,
        model: PreTrainedModel | Pruned,
        tokenizer: PreTrainedTokenizerBase,
        *,
        system: str = "",
        max_new_tokens: int = 512,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        tell: Callable[[str], None] = log.warning,
        kv: str | None = None,
        budget: int | str | None = None,
        compiled: bool = False,
    ):
        self.model, self.pruned = unwrap(model)
        if self.model.training:
            raise PruneError("the model is in training mode; call model.eval() first")
        if max_new_tokens < 1:
            raise PruneError(f"max_new_tokens={max_new_tokens} must be 1 or more")
        self.template = Template(tokenizer)
        self.system, self.max_new_tokens, self.tell = system, max_new_tokens, tell
        self.positions = max_positions(self.model)
        self._caches = Caches(self.model, self.pruned, kv=kv, budget=budget)
        self.sampler = Sampler(temperature, top_p, seed, self.model.device)
        self._ends = end_tokens(self.model, tokenizer)
        self._step: Any = self.model  # called for one token at a time
        self._last_only = (
            {"logits_to_keep": 1}
            if "logits_to_keep" in inspect.signature(type(self.model).forward).parameters
            else {}
        )
        self._stop = self._answering = False
        self.reset()
        if compiled:
            self._compile()

    def reset(self) -> None:
        """Forget the conversation; the system message stays."""
        self.messages: list[Message] = []
        self.tokens: list[int] = []  # of the conversation; the cache has read the first `seen`
        self._text = ""  # the same as text
        self._cache: Cache | None = None
        self._last: dict[str, Any] = {}

    def save(self, path: str | Path) -> Path:
        """Write the conversation, its settings and what the cache holds of it to one file."""
        self._refuse_while_answering()
        if not self.messages:
            raise PruneError("there is no conversation to save yet; say something first")
        notes = {
            "kind": "chat",
            "messages": self.messages,
            "tokens": self.tokens,
            "text": self._text,
            "system": self.system,
            "max_new_tokens": self.max_new_tokens,
            "sampler": self.sampler.state(),
        }
        return self._caches.snapshot(self._cache, notes).save(path)

    def load(self, path: str | Path) -> None:
        """Go on with a conversation that `save` wrote, as if it had never stopped.

        Its system message and settings come with it. If it is refused, nothing changes.
        """
        self._refuse_while_answering()
        snapshot = saved.load(path, "chat")
        notes = snapshot.notes
        sampler = Sampler.from_state(notes["sampler"], self.model.device)
        cache = self._caches.restore(snapshot)
        self.reset()
        self.messages, self.tokens, self._text = notes["messages"], notes["tokens"], notes["text"]
        self.system, self.max_new_tokens = notes["system"], notes["max_new_tokens"]
        self.sampler, self._cache = sampler, cache

    def stop(self) -> None:
        """End the current answer after its next token; callable from a signal handler or thread."""
        self._stop = True

    def say(self, text: str) -> Iterator[str]:
        """The answer, streamed in pieces.

        However it ends (close the iterator, stop, an error), what was generated is part of the
        conversation, and the next turn continues from there. A refused message changes nothing.
        """
        self._refuse_while_answering()
        if not text.strip():
            raise PruneError("the message is empty; write something")
        messages = [*self.messages, {"role": "user", "content": text}]
        first = [{"role": "system", "content": self.system}] if self.system else []
        prompt = self.template.prompt([*first, *messages])
        extends = prompt.startswith(self._text)
        new = self.template.tokens(prompt[len(self._text) :] if extends else prompt)
        tokens = [*self.tokens, *new] if extends else new
        room = self._room(len(tokens))
        if not extends:
            self.tell(
                "the conversation is written differently now than it was read (by the chat "
                "template, or another system message): the cache is rebuilt"
            )
            self._cache = None
        before = self.messages, self.tokens, self._text
        self.messages, self.tokens, self._text = messages, tokens, prompt
        answer: list[int] = []
        self._stop, self._answering = False, True
        try:
            yield from self._write(answer, room)
        except BudgetError:
            if not answer:
                self.messages, self.tokens, self._text = before
                if self.seen > len(self.tokens):  # a first part of the message did fit
                    self._cache = None
            raise
        finally:
            self._answering = False
            if self.messages is messages:  # not refused
                self._text += self.template.text(answer, special=True)
                messages.append({"role": "assistant", "content": self.template.text(answer)})

    def _refuse_while_answering(self) -> None:
        if self._answering:
            raise PruneError("the last answer is not done; take all of it or close its iterator")

    def _room(self, length: int) -> int:
        """Maximum number of tokens of the answer."""
        if self.positions is None:
            return self.max_new_tokens
        left = self.positions - length
        if left < 1:
            raise PruneError(
                f"with this message the conversation has {length} tokens, but the model has "
                f"{self.positions} positions (pruning frees memory, not positions); nothing was "
                f"read: shorten the message, or reset"
            )
        if left < self.max_new_tokens:
            self.tell(
                f"{length} of the model's {self.positions} positions are used (pruning frees "
                f"memory, not positions): the answer ends after {left} tokens at the latest"
            )
        return min(left, self.max_new_tokens)

    def _write(self, answer: list[int], room: int) -> Iterator[str]:
        """Read the new tokens and generate; tokens are added to `answer` and the conversation."""
        self._last = {"ended": "stopped"}
        logits = self._read()
        start, shown = time.perf_counter(), 0
        while logits is not None and not self._stop:
            token = self.sampler(logits)
            if token in self._ends:
                # the template adds it, with what follows it, at the next turn
                self._last["ended"] = "end"
                break
            answer.append(token)
            self.tokens.append(token)
            self._last |= _speed(len(answer), time.perf_counter() - start)
            if piece := self.template.piece(answer, shown):
                shown += len(piece)
                yield piece
            if len(answer) == room:
                self._last["ended"] = "length"
                break
            logits = self._read()
        if piece := self.template.piece(answer, shown, last=True):
            yield piece

    def _read(self) -> Tensor | None:
        """Read what the cache has not read yet; None if stopped on the way.

        Returns the logits of the next token: (V,)
        """
        logits = None
        while (seen := self.seen) < len(self.tokens):
            if self._stop:
                return None
            logits = self._forward(self.tokens[seen : seen + CHUNK])
        return logits

    @torch.no_grad()
    def _forward(self, tokens: list[int]) -> Tensor:
        if self._cache is None:
            self._cache = self._caches.new()
        row = torch.tensor([tokens], device=self.model.device)
        run = self._step if len(tokens) == 1 else self.model
        try:
            out: Any = run(
                input_ids=row, past_key_values=self._cache, use_cache=True, **self._last_only
            )
        except BaseException as error:
            # some layers have read the tokens and others have not: read all again next time
            if not isinstance(error, BudgetError) or error.rows:
                self._cache = None
            raise
        logits: Tensor = out.logits[0, -1]
        return logits

    def _compile(self) -> None:
        """Make the graph now, so that no answer waits for it; prompts go on without one."""
        self._step = torch.compile(self.model, fullgraph=True, dynamic=True)
        for tokens in ([0, 0], [0]):
            self._forward(tokens)
        self.reset()

    @property
    def seen(self) -> int:
        """Tokens that the cache has read."""
        return 0 if self._cache is None else int(self._cache.get_seq_length())

    @property
    def kept(self) -> float:
        """Tokens held per layer, mean over the pruned layers."""
        if not self.seen or not isinstance(self._cache, PrunedCache):
            return float(self.seen)
        return float(self._cache.kept.float().mean())

    @property
    def bytes(self) -> int:
        """Size of the cache."""
        return 0 if self._cache is None else nbytes(self._cache)

    @property
    def dense_bytes(self) -> int:
        """Size of a dense cache for the same tokens."""
        return self._cache.dense_nbytes if isinstance(self._cache, PrunedCache) else self.bytes

    def status(self) -> Status:
        return Status(self.seen, self.kept, self.bytes, self.dense_bytes, **self._last)

    def trace(self) -> Trace:
        """Which token dropped which in the conversation so far."""
        from kvprune.explain import Trace

        if self.pruned is None:
            raise PruneError("a dense model forgets nothing; load an adapter with --adapter")
        if not isinstance(self._cache, PrunedCache) or not self.seen:
            raise PruneError("nothing was read yet; say something first")
        tokenizer = self.template.tokenizer
        return Trace.from_cache(self._cache, tokenizer, self.tokens, pruned=self.pruned)


def _speed(tokens: int, seconds: float) -> dict[str, Any]:
    return {"tokens": tokens, "tokens_per_second": tokens / max(seconds, 1e-9)}
