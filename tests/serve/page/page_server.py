"""A small server that behaves as `kvprune serve` does towards its page, without a model.

`python tests/serve/page/page_server.py` serves the page with a made-up model that forgets.
"""

import json
import re
import sys
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from kvprune.serve.page import chat_page

LAYERS = 6
BYTES = 768  # of one token in one layer
ANSWER = (
    "The sky is blue because the air scatters short waves of light more than long ones. "
    "At noon the light comes straight down, so the blue reaches us from all sides. "
    "In the evening its way is long: the blue is lost, and what is left is red."
)


def pieces(text):
    """Words with the blank before them, special tokens, marks and line breaks."""
    return re.findall(r"<\|\w+\|>|\n|\s?\w+|\s?(?!<\|\w)[^\w\s]|\s", text)


def numbered(text):
    return [{"id": sum(map(ord, piece)) % 997, "text": piece} for piece in pieces(text)]


def template(messages):
    turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
    return "".join(turns) + "<|im_start|>assistant\n"


def regular_drops(layer, token, text, dropper, at_mark):
    """Whether a token is dropped by a later one: words fade soon, names and full stops stay."""
    age, weight = dropper - token, sum(map(ord, text)) * (7 + 5 * layer) % 23
    patience = 4 + weight + (30 if text.strip() in {".", "?"} or text.strip().istitle() else 0)
    return age >= (patience if at_mark else 3 * patience) and weight % 9 != layer % 9


@dataclass
class Row:
    """What a row has read, and what each layer of it still holds."""

    threshold: float | None = None
    rule: object = regular_drops
    layers: int = LAYERS
    read: int = 0
    held: list[list[int]] = field(default_factory=list)

    def __post_init__(self):
        self.held = [[] for _ in range(self.layers)]

    def step(self, tokens, upto):
        """Read as far as `upto`; the report of what was dropped on the way."""
        dropped = [[] for _ in range(self.layers)]
        for dropper in range(self.read, upto):
            marks = tokens[dropper]["text"].strip() in {".", ",", ":", ";", "?", "\n", ""}
            for layer, held in enumerate(self.held):
                gone = [] if self.threshold is not None and self.threshold < -1e6 else [
                    token for token in held
                    if self.rule(layer, token, tokens[token]["text"], dropper, marks)
                ]  # fmt: skip
                dropped[layer] += [[token, dropper] for token in gone]
                self.held[layer] = [token for token in held if token not in gone] + [dropper]
        self.read = upto
        kept = [len(held) for held in self.held]
        return {
            "step": upto,
            "dropped": [[layer, pairs] for layer, pairs in enumerate(dropped) if pairs],
            "kept": kept,
            "bytes": BYTES * sum(kept),
            "dense_bytes": BYTES * upto * self.layers,
        }


class PageServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, **values):
        super().__init__(("127.0.0.1", values.pop("port", 0)), Handler)
        self.answer = lambda body: ANSWER
        self.pace = 0.0  # seconds between two tokens
        self.hold_at = None  # after so many tokens of an answer, wait for `release`
        self.release = threading.Event()
        self.key = None
        self.refuse = None  # (status, message) for the next request
        self.break_at = None  # after so many tokens, an error within the stream
        self.report = True
        self.ends = False  # whether the end token is reported, which is no part of the text
        self.rule = regular_drops
        self.layers = LAYERS
        self.statuses = [[]]  # the rows of /v1/kv, one list per status
        self.status_pace = 0.05
        self.requests = []  # (path, body)
        self.known = {}  # the tokens of each completion, by its id
        self.trace_page = lambda id: None
        self.cancelled = []  # ids of completions whose client went away
        self.closing = threading.Event()
        for name, value in values.items():
            setattr(self, name, value)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/"

    def tokens_of(self, asked):
        """Of a text, or of the numbers of tokens that were handed out before."""
        if isinstance(asked, str):
            return numbered(asked)
        known = (tokens[: len(asked)] for tokens in self.known.values())
        return next(tokens for tokens in known if [token["id"] for token in tokens] == asked)

    def handle_error(self, request, client_address):
        """A client that goes away in the middle is no news."""


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def send(self, status, body, kind="application/json"):
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def fail(self, status, message, code=None):
        kind = "invalid_request_error"
        error = {"message": message, "type": kind, "param": None, "code": code}
        self.send(status, {"error": error})

    def allowed(self):
        key = self.server.key
        if key is None or self.headers.get("Authorization") == f"Bearer {key}":
            return True
        self.fail(401, "Incorrect API key provided.", "invalid_api_key")
        return False

    def start_stream(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-cache")
        self.end_headers()

    def event(self, data):
        text = data if isinstance(data, str) else json.dumps(data)
        self.wfile.write(f"data: {text}\n\n".encode())
        self.wfile.flush()

    def do_GET(self):
        server = self.server
        if self.path == "/":
            self.send(200, chat_page(), "text/html; charset=utf-8")
        elif not self.allowed():
            pass
        elif self.path == "/v1/models":
            model = {"id": "made-up-80", "object": "model", "max_model_len": 2048}
            self.send(200, {"object": "list", "data": [model]})
        elif self.path == "/v1/kv":
            self.stream_statuses()
        elif self.path.startswith("/v1/traces/"):
            page = server.trace_page(self.path.rsplit("/", 1)[1])
            if page:
                self.send(200, page, "text/html; charset=utf-8")
            else:
                self.fail(404, "There is no such trace.")
        else:
            self.fail(404, f"There is no {self.path}.")

    def stream_statuses(self):
        server, step = self.server, 0
        self.start_stream()
        while not server.closing.is_set():
            rows = server.statuses[min(step, len(server.statuses) - 1)]
            used = sum(row["bytes"] for row in rows)
            self.event({
                "step": step, "rows": rows, "bytes": used, "budget": 400_000,
                "prefix_bytes": 40_000, "kept_by_layer": [0] * server.layers,
                "counters": {"preemptions": sum(r["state"] == "preempted" for r in rows),
                             "admitted": len(rows)},
            })  # fmt: skip
            step += 1
            server.closing.wait(server.status_pace)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.allowed():
            return
        server = self.server
        server.requests.append((self.path, body))
        if server.refuse:
            (status, message), server.refuse = server.refuse, None
            self.fail(status, message)
            return
        id = f"cmpl-{len(server.requests)}"
        try:
            self.complete(body, id)
        except OSError:
            server.cancelled.append(id)

    def complete(self, body, id):
        server, chat = self.server, self.path == "/v1/chat/completions"
        asked = template(body["messages"]) if chat else body["prompt"]
        prompt = server.tokens_of(asked)
        whole = numbered(server.answer(body))
        tokens = whole[: body.get("max_tokens")]
        finish = "stop" if tokens == whole else "length"
        pruning = body.get("kvprune", {})
        row = Row(pruning.get("threshold"), server.rule, server.layers)
        server.known[id] = prompt + tokens
        first = {"layers": server.layers, "prompt_tokens": prompt,
                 "drops": row.step(prompt, len(prompt))}  # fmt: skip

        def chunk(words, finish=None, news=None, **fields):
            delta = {"delta": {"content": words}} if chat else {"text": words}
            choice = {"index": 0, "finish_reason": finish, **delta}
            part = {"id": id, "model": "made-up-80", "choices": [choice], **fields}
            if news and server.report:
                part["kvprune"] = news
            self.event(part)

        self.start_stream()
        self.wfile.write(b": ping\n\n")
        chunk("", news=first)
        for n, token in enumerate(tokens):
            if n == server.hold_at and not server.release.wait(20):
                return
            if n == server.break_at:
                self.event({"error": {"message": "The engine died.", "param": None}})
                return
            if server.pace:
                time.sleep(server.pace)
            everything = prompt + tokens
            drops = row.step(everything, len(prompt) + n) if n else None
            chunk(token["text"], news={"tokens": [token], **({"drops": drops} if drops else {})})
        if server.ends:
            chunk("", news={"tokens": [{"id": 2, "text": "<|im_end|>"}]})
        chunk("", finish)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(tokens),
                 "prompt_tokens_details": {"cached_tokens": len(prompt) // 2}}  # fmt: skip
        self.event({"id": id, "choices": [], "usage": usage})
        self.event("[DONE]")


@contextmanager
def serving(**values):
    """A server in a thread of its own, gone when the block ends."""
    server = PageServer(**values)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.release.set()
        server.shutdown()
        server.server_close()
        thread.join()


def busy_rows(step):
    """Rows that come, grow, are preempted and leave, for the demonstration."""
    rows = []
    for n in range(7):
        age = (step + 37 * n) % 260
        if age > 215:
            continue
        tokens = 300 + 90 * n + age
        state = "waiting" if age < 8 else "preempted" if n == 6 and 90 < age < 130 else "running"
        read = 0 if age < 8 else min(tokens, 120 * (age - 7))
        kept = read * (0.3 - 0.02 * n) if state == "running" else 0
        rows.append({"request": f"chatcmpl-{91 + n}", "index": 0, "state": state,
                     "tokens": tokens, "read": read, "kept": kept,
                     "bytes": int(kept * 250)})  # fmt: skip
    return rows


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8010
    values = {"port": port, "pace": 0.06, "layers": 12, "status_pace": 0.15}
    with serving(**values, statuses=[busy_rows(step) for step in range(5000)]) as server:
        print(server.url)
        with suppress(KeyboardInterrupt):
            threading.Event().wait()
