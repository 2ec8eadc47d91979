"""An engine without a model: it says the prompt back, token by token, as fast as it is told."""

import queue
import threading
import time
from collections import Counter

from kvprune.serve.request import (
    Drops,
    Event,
    Request,
    RequestError,
    RowStatus,
    Status,
    Token,
    Usage,
)
from model_folders import byte_tokenizer

LAYERS = 2
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('a system message must come first') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def chat_tokenizer():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


class FakeEngine:
    """One thread, one token per choice and step; `delay` seconds before each token."""

    def __init__(self, tokenizer=None, positions=400, delay=0.0, max_waiting=64, name="fake"):
        self.tokenizer = tokenizer or chat_tokenizer()
        self.name, self.positions, self.delay, self.max_waiting = (
            name,
            positions,
            delay,
            max_waiting,
        )
        self.vocabulary = len(self.tokenizer)
        self.alive, self.ready, self.failure = True, True, ""
        self.others: tuple[str, ...] = ()  # models beside the first
        self.requests: list[Request] = []
        self.cancelled: list[str] = []
        self.running: dict[str, tuple] = {}
        self.pages: dict[str, str] = {}
        self.pinned: dict[str, dict] = {}
        self.error: RequestError | None = None
        self.counters = Counter(preemptions=1, prefix_queries=4, prefix_hits=3)
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()
        self._watchers: list = []
        self._steps = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def models(self):
        return (self.name, *self.others)

    def start(self):
        self._thread = threading.Thread(target=self._run, name="fake-engine")
        self._thread.start()

    def stop(self, drain=0.0):
        if self._thread is not None:
            self._inbox.put(None)
            self._thread.join(5)
            assert not self._thread.is_alive()
            self._thread = None

    def die(self, reason):
        """As if the thread had ended by itself: nothing is ever said again."""
        self.alive, self.failure = False, reason
        self.stop()

    def submit(self, request, sink):
        if not self.alive:
            raise RequestError("the engine has stopped", status=503)
        if len(self.running) >= self.max_waiting:
            raise RequestError("too many requests wait", status=429)
        with self._lock:
            self.requests.append(request)
            self.running[request.id] = (request, sink, self._says(request))
        self._inbox.put("work")

    def cancel(self, id):
        with self._lock:
            self.cancelled.append(id)
            found = self.running.pop(id, None)
        if found is not None:
            self.counters["requests_cancelled"] += found[0].n

    def status(self):
        with self._lock:
            rows = tuple(
                RowStatus(id, i, "running", len(request.prompt), len(request.prompt), 2.0, 100)
                for id, (request, *_) in self.running.items()
                for i in range(request.n)
            )
        counters = {**self.counters, "dropped_by_layer": [3, 4], "steps": self._steps}
        return Status(self._steps, rows, 100 * len(rows), 1000, 50, (2, 3), counters)

    def watch(self, sink):
        self._watchers.append(sink)
        return lambda: self._watchers.remove(sink)

    def trace_page(self, id):
        return self.pages.get(id)

    def pin(self, prompt, settings, salt, sink, model=""):
        id = f"prefix-{len(self.pinned)}"
        self.pinned[id] = {"id": id, "tokens": len(prompt), "bytes": 7, "pinned": True, "hits": 0}
        self.pinned[id]["model"] = model
        sink([Event(0, finish="length", usage=Usage(len(prompt), 0))])

    def prefixes(self):
        return list(self.pinned.values())

    def unpin(self, id):
        return self.pinned.pop(id, None) is not None

    def _run(self):
        while True:
            try:
                if self._inbox.get(timeout=0.01 if self.running else None) is None:
                    return
            except queue.Empty:
                pass
            while self.running and self.alive:
                if self.delay:
                    time.sleep(self.delay)
                with self._lock:
                    work = list(self.running.values())
                self._steps += 1
                for request, sink, steps in work:
                    events = next(steps, None)
                    if events is None:
                        with self._lock:
                            self.running.pop(request.id, None)
                    elif request.id in self.running:
                        sink(events)
                for watcher in list(self._watchers):
                    watcher(self.status())

    def _says(self, request):
        """One list of events per step."""
        if self.error is not None:
            yield [Event(0, finish="error", error=self.error)]
            return
        size = len(request.prompt)
        prompt = None
        if request.prompt_logprobs is not None:
            scored = [self._token(t, request.prompt_logprobs) for t in request.prompt[1:]]
            prompt = (Token(request.prompt[0]), *scored)
        text, tokens = "", []
        for step in range(request.max_tokens):
            id = request.prompt[step % size]
            tokens.append(id)
            piece = self.tokenizer.decode([id])
            text += piece
            stop = next((s for s in request.stop if s in text and step >= request.min_tokens), None)
            ended = stop or (id == 0 and not request.ignore_eos)
            if stop:
                piece = "" if not request.include_stop else piece
            if id == 0 and not request.ignore_eos:
                piece = ""
            finish = "stop" if ended else "length" if step + 1 == request.max_tokens else None
            yield self._events(request, step, piece, id, prompt, finish, stop)
            prompt = None
            if ended:
                return
        if not request.max_tokens:
            usage = Usage(size, 0)
            yield [Event(i, prompt=prompt, finish="length", usage=usage) for i in range(request.n)]

    def _events(self, request, step, piece, id, prompt, finish, stop):
        size = len(request.prompt)
        seen = size + step
        drops = None
        if request.report or finish:
            dropped = ((1, ((step, seen),)),) if request.report else ()
            drops = Drops(seen, dropped, (seen, seen // 2), 10 * seen, 20 * seen)
        usage = Usage(size, step + 1, size // 2) if finish else None
        token = self._token(id, request.logprobs) if request.logprobs is not None else Token(id)
        return [
            Event(i, piece, (token,), prompt, drops, finish, stop, usage) for i in range(request.n)
        ]

    @staticmethod
    def _token(id, top):
        """Odd tokens are the likeliest, even ones come second."""
        own = -0.5 if id % 2 else -1.5
        best = ((id, own), (id - 1 if id else 1, -2.5)) if id % 2 else ((id + 1, -0.5), (id, own))
        return Token(id, own, best[:top])
