"""Serves requests, a step at a time: plain calls, no threads."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvprune.chat.template import end_tokens
from kvprune.errors import BudgetError
from kvprune.serve.arrivals import Arrivals, Post
from kvprune.serve.choice import Choice, Sink
from kvprune.serve.counters import Counters
from kvprune.serve.drops import LayerDrops, fresh_drops
from kvprune.serve.prefixes import Prefixes
from kvprune.serve.request import (
    Drops,
    Event,
    Finish,
    Request,
    RequestError,
    RowStatus,
    Status,
    Token,
)
from kvprune.serve.runner import Runner
from kvprune.serve.sampling import log_probabilities
from kvprune.serve.scheduler import Admission, Forecast, Plan, Scheduler

if TYPE_CHECKING:
    from kvprune.cache.snapshot import Snapshot
    from kvprune.integration.handle import Pruned
    from kvprune.serve.shelf import Shelf

log = logging.getLogger(__name__)

# requests with a report whose record is kept after they have ended
TRACES = 16


class Core:
    """The rows of all requests, from their first token to their last event."""

    def __init__(
        self,
        models: Pruned | Mapping[str, Pruned],
        budget: int,
        prefix_budget: int,
        kv: str | None = None,
        max_rows: int = 64,
        chunk: int = 1024,
        admission: Admission = "forecast",
        shelf: Shelf | None = None,
        post: Post = lambda call: call(),
    ):
        """`models`: one, or several that share their weights, by name.

        shelf: where snapshots are beside the memory; post: has a call made by the engine's thread.
        """
        self.models = models if isinstance(models, Mapping) else {"": models}
        self.pruned = next(iter(self.models.values()))
        self.tokenizer, self.budget = self.pruned.tokenizer, budget
        self.ends = frozenset(end_tokens(self.pruned.model, self.tokenizer))
        self.runner = Runner(self.models, budget, kv)
        self.scheduler = Scheduler(self.runner, budget, max_rows, chunk, admission)
        for name, pruned in self.models.items():
            self.scheduler.forecasts[name] = Forecast(0.5 if pruned.working.prunes else 1.0)
        self.prefixes = Prefixes(prefix_budget)
        self.arrivals = Arrivals(self.runner, self.prefixes, shelf, post)
        self.requests: dict[str, list[Choice]] = {}
        self.traces: OrderedDict[str, tuple[str, list[int], Tensor]] = OrderedDict()
        self._news: dict[Sink, list[Event]] = {}
        self._parked = 0  # bytes of rows that were preempted
        self.counters = Counters(self.runner.layers, self.models)

    @property
    def waiting(self) -> int:
        """Choices that have not begun yet."""
        return self.arrivals.waiting + sum(
            not choice.preemptions and choice not in self.scheduler.running
            for choices in self.requests.values()
            for choice in choices
        )

    def begin(self, request: Request, sink: Sink, pins: bool = False) -> None:
        """A request comes; `pins`: its prompt is kept as a prefix."""
        request = replace(request, model=request.model or next(iter(self.models)))
        self.arrivals.come(request, sink, pins, self._begin)

    def _begin(self, request: Request, sink: Sink, pins: bool, stored: Snapshot | None) -> None:
        model = request.model
        at_once = self.runner.method(model, request.settings).cuts_prompts
        choices = [
            Choice(request, index, sink, self.tokenizer, at_once) for index in range(request.n)
        ]
        first = choices[0]
        first.pins = pins
        if not first.all_logits:
            self.counters.add("prefix_queries", model)
            first.snapshot = self._kept(first, stored)
            if first.snapshot is not None:
                first.done = first.cached = first.snapshot.tokens
                self.counters.add("prefix_hits", model)
                self.counters.add("prefix_hit_tokens", model, first.cached)
        self.requests[request.id] = choices
        self.counters.add("prompt_tokens", model, first.prompt)
        # the others go on from the first one's prompt
        self.scheduler.add(first)

    def _kept(self, choice: Choice, stored: Snapshot | None) -> Snapshot | None:
        """The longest row that the prompt goes on from: in memory, or what the shelf has found."""
        if stored is not None:
            self.prefixes.add(choice.tokens[: stored.tokens], choice.prefix_kind, stored)
        prefix = self.prefixes.find(choice.tokens, choice.prefix_kind)
        found = None if prefix is None else prefix.snapshot
        # there may have been no room for it in memory
        longer = stored is not None and (found is None or found.tokens < stored.tokens)
        return stored if longer else found

    def step(self) -> None:
        """Rows leave and come, a forward pass, and a token for each row that caught up."""
        plan = self.scheduler.plan()
        for row in plan.too_large:
            self._end_too_large(_choice(row))
        if not plan.too_large and (plan.work or plan.preempt):
            self._move_rows(plan)
            if plan.work:
                self._forward(plan)

    def _move_rows(self, plan: Plan) -> None:
        for row in plan.preempt:
            choice = _choice(row)
            self.counters.add("preemptions", choice.model)
            size = self.runner.held(choice)
            # on top of the budget for prefixes, which give way
            self.prefixes.shrink(self.prefixes.budget - self._parked - size)
            if self._parked + size + self.prefixes.bytes <= self.prefixes.budget:
                choice.snapshot = self.runner.snapshot(choice)
                self._parked += choice.snapshot.nbytes
                choice.parked = choice.snapshot.nbytes
            self.runner.leave(choice)
            if choice.snapshot is None:
                choice.done = 0
        self.scheduler.apply(plan)
        for row in plan.admit:
            choice = _choice(row)
            try:
                self.runner.enter(choice)
            except BudgetError:
                self._wait_on(choice, plan)
                continue
            self._parked -= choice.parked
            choice.parked = 0
            self.counters["admitted"] += 1

    def _wait_on(self, choice: Choice, plan: Plan) -> None:
        """Its snapshot fits, but not between what is there: later, or it is read again."""
        plan.work.pop(choice)
        self.scheduler.running.remove(choice)
        self.scheduler.waiting.appendleft(choice)
        if not self.scheduler.running:
            self._parked -= choice.parked
            choice.parked, choice.snapshot, choice.done = 0, None, 0

    def _forward(self, plan: Plan) -> None:
        work = {_choice(row): count for row, count in plan.work.items()}
        try:
            logits = self.runner.step({row: count for row, count in work.items()})  # noqa: C416
        except BudgetError as error:
            log.warning("all rows are read again: %s", error)
            self._read_all_again()
            return
        self.counters["steps"] += 1
        self.counters["peak_bytes"] = max(self.counters["peak_bytes"], self.runner.bytes)
        self.counters["seen_slots"] += sum(work.values()) * self.runner.layers
        ready = []
        for choice in work:
            if choice.all_logits and not choice.new:
                self._note_prompt(choice, logits[choice], work[choice])
            if choice.done in choice.stops_at or (choice.done == choice.prompt and not choice.new):
                self._keep_prefix(choice, choice.stops_at)
            if choice.left == 0:
                ready.append(choice)
        for choice in ready:
            if choice.index == 0 and not choice.new and choice.request.n > 1:
                self._fork(choice, logits[choice][-1:])
        self._sample({choice: logits[choice][-1] for choice in ready})
        self._report(work)

    def _sample(self, logits: dict[Choice, Tensor]) -> None:
        """Choose the next token of each row, and tell."""
        if not logits:
            return
        ends = {choice: choice.banned(self.ends) for choice in logits}
        easy = [c for c in logits if c.sampler.plain and not ends[c] and c.request.max_tokens]
        best = dict(zip(easy, _argmax([logits[choice] for choice in easy]), strict=True))
        for choice, row in logits.items():
            if not choice.request.max_tokens:
                self._end(choice, choice.event(finish="length"))
                continue
            token = best.get(choice)
            if token is None:
                token = choice.sampler.choose(row.float().cpu().clone(), ends[choice])
            asked = choice.request.logprobs
            if asked is None:
                news = Token(token)
            else:
                news = log_probabilities(row[None].cpu(), [token], asked)[0]
            self.counters.add("generation_tokens", choice.model)
            event = choice.take(news, self.ends)
            if event.finish:
                self._end(choice, event)
            else:
                self._tell(choice, event)

    def _fork(self, first: Choice, logits: Tensor) -> None:
        """The prompt is read: the other choices begin from here, with a token of their own."""
        snapshot = self.runner.snapshot(first)
        for choice in self.requests[first.request.id][1:]:
            choice.snapshot, choice.cached, choice.done = snapshot, first.cached, first.done
            choice.prompt_logs = list(first.prompt_logs)
            self.scheduler.add(choice)
            self._sample({choice: logits[0]})

    def _note_prompt(self, choice: Choice, logits: Tensor, count: int) -> None:
        """Log-probabilities of the tokens that follow those that were just read."""
        asked = choice.request.prompt_logprobs or 0
        if not choice.noted and not choice.prompt_logs:
            choice.prompt_logs.append(Token(choice.tokens[0]))
        # of a row that is read again, those that were noted before are not noted twice
        start = choice.done - count
        known = max(choice.noted - start, 0)
        following = choice.tokens[start + 1 + known : min(choice.done + 1, choice.prompt)]
        own = logits[known : known + len(following)].cpu()
        choice.prompt_logs += log_probabilities(own, following, asked) if following else []
        choice.noted = max(choice.noted, start + known + len(following))

    def _keep_prefix(self, choice: Choice, boundaries: Iterable[int]) -> None:
        """Keep a row at a boundary, or if it is to be pinned."""
        pins = choice.pins and choice.done == choice.prompt
        if choice.done not in boundaries and not pins:
            return
        tokens = choice.tokens[: choice.done]
        if pins or self.prefixes.wants(tokens, choice.prefix_kind):
            snapshot = self.runner.snapshot(choice)
            self.prefixes.add(tokens, choice.prefix_kind, snapshot, pinned=pins)
            self.arrivals.keep(tokens, choice.request, snapshot)

    def _report(self, work: dict[Choice, int]) -> None:
        """Tell what was dropped, to those who asked; rows that ended were told."""
        for choice in work:
            if choice.request.report and choice in self.scheduler.running:
                news = self._news.setdefault(choice.sink, [])
                # with the news of its token, if there is any
                own = [i for i, event in enumerate(news) if event.index == choice.index]
                event = news.pop(own[-1]) if own else choice.event()
                self._tell(choice, replace(event, drops=self._drops(choice)))

    def _drops(self, choice: Choice) -> Drops:
        fresh, choice.dropped = fresh_drops(self.runner.drop_step(choice), choice.dropped)
        return self._sizes(choice, fresh)

    def _sizes(self, choice: Choice, dropped: LayerDrops = ()) -> Drops:
        """What a row holds now, and what it dropped."""
        return Drops(
            choice.done,
            dropped,
            tuple(self.runner.kept(choice)),
            self.runner.held(choice),
            choice.done * self.runner.dense_slot,
        )

    def _end(self, choice: Choice, event: Event) -> None:
        """A choice has ended: its row goes, and a later turn may go on from it."""
        request = choice.request
        running = choice in self.scheduler.running
        if running and choice.done:
            if request.report:
                event = replace(event, drops=self._drops(choice))
                if choice.index == 0:
                    record = self.runner.drop_step(choice).clone()
                    self.traces[request.id] = choice.model, choice.tokens[: choice.done], record
                    while len(self.traces) > TRACES:
                        self.traces.popitem(last=False)
            else:
                event = replace(event, drops=self._sizes(choice))
            self.counters.drop(choice.done, self.runner.kept(choice))
            if event.finish in ("stop", "length") and choice.new and not choice.all_logits:
                self._keep_prefix(choice, (choice.done,))
        self._tell(choice, event)
        self.counters.add(f"requests_{event.finish}", choice.model)
        self.scheduler.remove(choice)
        self.counters["forecast_error"] = self.scheduler.forecast(choice).error
        self._parked -= choice.parked
        if running:
            self.runner.leave(choice)
        choices = self.requests[request.id]
        choices.remove(choice)
        if not choices:
            del self.requests[request.id]

    def end_all(self, id: str, finish: Finish, error: RequestError | None = None) -> None:
        """End all choices of a request, whatever they are doing."""
        if (waited := self.arrivals.leave(id)) is not None:
            request, sink = waited
            for index in range(request.n):
                self._news.setdefault(sink, []).append(Event(index, finish=finish, error=error))
            self.counters.add(f"requests_{finish}", request.model, request.n)
        for choice in list(self.requests.get(id, [])):
            known = choice in self.scheduler.running or choice in self.scheduler.waiting
            if known:
                self._end(choice, choice.event(finish=finish, error=error))
                continue
            # it waits for the first one's prompt
            self._tell(choice, choice.event(finish=finish, error=error))
            self.requests[id].remove(choice)
            if not self.requests[id]:
                del self.requests[id]

    def _end_too_large(self, choice: Choice) -> None:
        """Even alone the row does not fit: an answer ends here, a prompt cannot be read."""
        if choice.new:
            self._end(choice, choice.event(finish="length"))
            return
        error = RequestError(
            f"the prompt of {choice.prompt:,} tokens does not fit into the {self.budget:,} bytes "
            f"that all caches may take: after {choice.done:,} of them it holds "
            f"{self.runner.held(choice):,}; shorten it, or start the server with a larger "
            f"--kv-budget",
            code="context_length_exceeded",
            param="prompt",
        )
        self.end_all(choice.request.id, "error", error)

    def _read_all_again(self) -> None:
        """The memory did not suffice in the middle of a pass: no cache can be trusted."""
        rows = self.runner.reset()
        self.counters["read_again"] += len(rows)
        plan = Plan(preempt=list(self.scheduler.running))
        self.scheduler.was_short(plan.preempt)
        self.scheduler.apply(plan)

    def fail_all(self, error: RequestError) -> None:
        """End everything at once; the rows are not touched any more."""
        for id in list(self.arrivals.looking):
            self.end_all(id, "error", error)
        for choices in self.requests.values():
            for choice in choices:
                self._tell(choice, choice.event(finish="error", error=error))
        self.requests.clear()
        self.send()

    def _tell(self, choice: Choice, event: Event) -> None:
        self._news.setdefault(choice.sink, []).append(event)

    def send(self) -> None:
        """Give all news to their sinks, a list each."""
        news, self._news = self._news, {}
        for sink, events in news.items():
            try:
                sink(events)
            except Exception:  # a client's trouble is not the engine's
                log.exception("a sink failed")

    def status(self) -> Status:
        rows = []
        for row in self.scheduler.running:
            choice, kept = _choice(row), self.runner.kept(_choice(row))
            rows.append(RowStatus(
                choice.request.id, choice.index, "running", len(choice.tokens), choice.done,
                sum(kept) / len(kept), self.runner.held(choice), choice.model,
            ))  # fmt: skip
        for row in self.scheduler.waiting:
            choice = _choice(row)
            rows.append(RowStatus(
                choice.request.id, choice.index, "preempted" if choice.preemptions else "waiting",
                len(choice.tokens), choice.done, 0.0, 0, choice.model,
            ))  # fmt: skip
        return Status(
            self.counters["steps"],
            tuple(rows),
            self.runner.bytes,
            self.budget,
            self.prefixes.bytes + self._parked,
            tuple(self.runner.kept_by_layer()),
            self.counters.frozen() | self.arrivals.counted(),
        )


def _choice(row: object) -> Choice:
    assert isinstance(row, Choice)
    return row


def _argmax(logits: list[Tensor]) -> list[int]:
    return torch.stack(logits).argmax(-1).tolist() if logits else []
