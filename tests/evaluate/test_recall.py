"""kvprune eval recall: puzzles against a solver that reads them, models against plain maths.

The fakes know nothing but the prompt's tokens: one solves it with regular expressions, one has
forgotten all but the question.
"""

import json
import re
from collections import Counter
from random import Random

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

import model_folders
import zoo
from helpers import attach_uneven, random_ids
from kvprune import PruneError, tiny
from kvprune.adapters.pretrained import load_tokenizer
from kvprune.cli import app
from kvprune.evaluate.points import Points
from kvprune.evaluate.reader import Reader
from kvprune.evaluate.recall import repeats
from kvprune.evaluate.recall.measure import Plan, recall, summary
from kvprune.evaluate.recall.prompts import Haystack
from kvprune.evaluate.recall.tasks import TASKS, Puzzle, score
from kvprune.evaluate.recall.writer import Writer, Written
from kvprune.evaluate.text_file import read_text
from kvprune.utils.intervals import bootstrap, wilson

CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def haystack():
    text = read_text(tiny.text_file("held_out"))[:60_000]
    return Haystack(load_tokenizer("tiny"), text)


class Solver:
    """Answers from the text of the prompt, or from nothing but its last paragraph."""

    def __init__(self, tokenizer, forgets=False):
        self.tokenizer, self.forgets = tokenizer, forgets

    def write(self, ids, most, right):
        answers = [self.solve(self.tokenizer.decode(row)) for row in ids.tolist()]
        tokens = [self.tokenizer(" " + a, add_special_tokens=False).input_ids for a in answers]
        return Written(tokens, [0.0] * len(ids), [10.0] * len(ids))

    def solve(self, prompt):
        question = prompt.rsplit("\n\n", 1)[-1]
        text = question if self.forgets else prompt.rsplit("\n\n", 1)[0]
        if "Repeat the passage" in question:
            found = re.search(r"Passage: (.*) End of the passage\.", text, re.DOTALL)
            # the first five words are given
            return " ".join(found[1].split()[5:]) if found else ""
        if "occur most often" in question:
            said = Counter(re.findall(r"Word \d+: (\w+)\.", text))
            return ", ".join(word for word, _ in said.most_common(3))
        if "variables" in question:
            value = re.search(r"value (\d+)", question)[1]
            set_to = dict(re.findall(r"VAR ([A-Z]+) = (?:VAR )?(\w+)\.", text))

            def resolved(name):
                while name in set_to:
                    name = set_to[name]
                return name

            return ", ".join(name for name in set_to if resolved(name) == value)
        city = re.search(r"city of (\w+)\?", question)[1]
        return ", ".join(re.findall(rf"city of {city} is (\d+)\.", text))


@pytest.mark.parametrize("chat", [False, True])
def test_who_reads_the_prompt_scores_all_and_who_forgets_it_nothing(haystack, chat):
    if chat:
        tokenizer = load_tokenizer("tiny")
        tokenizer.chat_template = CHAT
        haystack = Haystack(tokenizer, read_text(tiny.text_file("held_out"))[:60_000])
        assert haystack.chat
    plan = Plan(tuple(TASKS), (420, 700), (0.0, 0.5, 1.0), samples=3, batch=2)
    for forgets, share in ((False, 1.0), (True, 0.0)):
        solver = Solver(haystack.tokenizer, forgets)
        rows = recall(solver, "solver", haystack, plan, Points(None), progress=False)
        assert len(rows) == len(TASKS) * 2 * 3 * 3
        assert [row for row in rows if row["score"] != share] == []
        means = summary(rows)
        ends = {round((row["low"], row["high"])[int(share)], 12) for row in means}
        assert ends == {share}
        assert {row["n"] for row in means} == {3, 9}
        assert {row["sparsity"] for row in means} == {1 - 10 / 420, 1 - 10 / 700}


def test_prompts_have_their_length_and_the_fact_its_depth(haystack):
    for task in TASKS:
        for context in (420, 901):
            prompts = [haystack.prompt(task, context, d, 0) for d in (0.0, 0.5, 1.0)]
            assert {len(prompt.ids) for prompt in prompts} == {context}
    places = []
    for depth in (0.0, 0.5, 1.0):
        text = haystack.tokenizer.decode(haystack.prompt("needle", 900, depth, 0).ids)
        place = text.index("The secret number of the city")
        places.append(place / len(text))
    assert [round(place, 1) for place in places] == [0.0, 0.5, 1.0]


def test_facts_stand_between_sentences_where_one_ends_near_by(haystack):
    before = []
    for sample in range(20):
        text = haystack.tokenizer.decode(haystack.prompt("needle", 420, 0.5, sample).ids)
        before.append(text[: text.index("The secret number of the city")].rstrip()[-1])
    # anywhere, 6 % of the tokens end one
    assert sum(letter in ".!?" for letter in before) > 10


def test_the_seed_decides_everything(haystack):
    def ids(sample=0, seed=0):
        return haystack.prompt("multikey", 420, 0.5, sample, seed).ids

    assert ids() == ids()
    assert ids() != ids(sample=1)
    assert ids() != ids(seed=1)


def test_scores_are_what_a_reader_would_give():
    def puzzle(*answers, in_order=False):
        return Puzzle([], "", "", "", answers, in_order)

    assert score(puzzle("4817"), " 4817.") == 1
    assert score(puzzle("4817"), "it is 4,817") == 1
    assert score(puzzle("4817"), " 14817") == 0
    assert score(puzzle("4817"), " 48170") == 0
    assert score(puzzle("4817", "2031"), "4817,2031") == 1
    assert score(puzzle("4817", "2031"), "2031 and 1111") == 0.5
    assert score(puzzle("lamp", "river"), "Lamp; rivers") == 0.5
    passage = puzzle("He", "said,", "“No!”", "and", "left", in_order=True)
    assert score(passage, 'he said, "No!" and left') == 1
    assert score(passage, "He said yes and left") == 0.4
    assert score(passage, "He said") == 0.4
    assert score(passage, "and left") == 0


@pytest.mark.parametrize("dense", ["plain", "open", None])
def test_a_model_writes_and_scores_as_its_own_full_passes(dense):
    model = zoo.make("llama")
    pruned = None if dense == "plain" else attach_uneven(model)
    writer = Writer(pruned or model, gates_open=dense == "open")
    ids, right = random_ids(2, 40), [[5, 6, 7], [8, 9, 10, 11]]
    got = writer.write(ids, 5, right)

    def logits(row):
        reader = Reader(pruned or model, gates_open=dense == "open")
        return next(reader.read(torch.tensor([row])))[0]

    for b, row in enumerate(ids.tolist()):
        text = list(row)
        for _ in range(5):
            text.append(int(logits(text)[-1].argmax()))
        assert got.tokens[b] == text[len(row) :]
        log_p = logits([*row, *right[b]])[len(row) - 1 : -1].log_softmax(-1)
        want = log_p[range(len(right[b])), right[b]].mean()
        assert got.log_p[b] == pytest.approx(float(want), abs=1e-5)
    steps = None if dense else pruned.trace(ids)
    want = 40.0 if dense else (steps >= 40).float().sum(-1).mean(0)
    assert got.kept == pytest.approx(want if dense is None else [40.0, 40.0])
    assert dense or min(got.kept) < 36


def test_writing_stops_at_the_end_of_the_text():
    model = zoo.make("llama")
    ids = random_ids(1, 12)
    free = Writer(model).write(ids, 6, [[1]]).tokens[0]
    assert len(free) == 6
    assert Writer(model, end=[free[0]]).write(ids, 6, [[1]]).tokens == [[]]


def test_repeats_are_those_that_plain_search_finds():
    random = Random(3)
    for T in (1, 2, 9, 80):
        ids = [random.randrange(3) for _ in range(T)]
        matched, distance = repeats.matches(ids)
        for t in range(T):
            runs = {}
            for d in range(1, t + 1):
                length = 0
                while length <= t - d and ids[t - length] == ids[t - d - length]:
                    length += 1
                runs.setdefault(length, d)
            longest = max(runs, default=0)
            assert matched[t] == max(longest - 1, 0)
            assert distance[t] == (runs[longest] if longest else 0)


def test_windows_repeat_spans_and_every_token_is_counted_once(haystack):
    model = zoo.make("llama", vocab_size=6000, max_position_embeddings=300)
    pruned = attach_uneven(model)
    said, back, before = 0, [], 0
    for seed in range(8):
        random = Random(seed)
        plain = haystack.window(300, random)
        matched, distance = repeats.matches(repeats.repeating(plain, random))
        said += int((matched >= 4).sum())
        before += int((repeats.matches(plain)[0] >= 4).sum())
        back += distance[matched >= 4].tolist()
    # spans are a quarter of the text, less their first four tokens
    assert 0.1 < said / (8 * 300) < 0.3
    assert before < said / 10
    assert min(back) < 40
    assert max(back) > 150
    sides = {"pruned": Reader(pruned), "dense": Reader(pruned, gates_open=True)}
    rows = [
        row
        for side, reader in sides.items()
        for row in repeats.measure_repeats(reader, side, haystack, [300], 3, Points(None),
                                           progress=False)
    ]  # fmt: skip
    for side, reader in sides.items():
        own = [row for row in rows if (row["side"], row["sample"]) == (side, 0)]
        assert sum(row["tokens"] for row in own) == 299
        random = Random("repeats 300 0 0")
        text = torch.tensor([repeats.repeating(haystack.window(300, random), random)])
        logits = next(reader.read(text))[0, :-1]
        want = F.cross_entropy(logits, text[0, 1:], reduction="sum")
        assert sum(row["loss"] for row in own) == pytest.approx(float(want), rel=1e-5)
    means = repeats.summary(rows)
    ours = {(r["matched"], r["distance"]): r for r in means if r["side"] == "pruned"}
    theirs = {(r["matched"], r["distance"]): r for r in means if r["side"] == "dense"}
    for kind, row in ours.items():
        assert row["ratio"] == pytest.approx(row["perplexity"] / theirs[kind]["perplexity"])
        assert row["low"] <= row["ratio"] <= row["high"]
    assert theirs["rest", "rest"]["ratio"] is None
    both = ours["all", "all"]["tokens"] + ours["rest", "rest"]["tokens"]
    assert both == 3 * 299
    assert 0.05 < ours["rest", "rest"]["sparsity"] < 0.95


def test_intervals():
    assert wilson(0.5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson(1.0, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert wilson(0.0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    cases = [float(i) for i in range(100)]
    low, high = bootstrap(cases, lambda drawn: sum(drawn) / len(drawn))
    # 49.5 ± 1.96 · 28.87 / 10
    assert (low, high) == pytest.approx((43.8, 55.2), abs=1.0)
    assert bootstrap([3.0], max) == (3.0, 3.0)


def cli(*args: object) -> str:
    result = CliRunner().invoke(app, ["eval", "recall", *map(str, args)])
    if result.exception is not None:
        raise result.exception
    return result.stdout


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    path = model_folders.save(tmp_path_factory.mktemp("recall"), positions=600)
    (path / "text.txt").write_text(read_text(tiny.text_file("held_out"))[:3000])
    return path


def test_the_command_measures_all_sides_and_resumes(root, tmp_path):
    args = [root / "model", "--adapter", root / "adapter", "--text", root / "text.txt", "--tasks",
            "needle,repeats", "--contexts", "230,260", "--depths", "0.5", "--samples", 2,
            "--policies", "streaming,h2o", "--out", tmp_path / "o"]  # fmt: skip
    first = json.loads(cli(*args, "--json"))
    sides = ["pruned", "dense", "streaming", "h2o"]
    assert list(dict.fromkeys(row["side"] for row in first["rows"])) == sides
    assert list(dict.fromkeys(row["side"] for row in first["repeats"])) == sides
    by_side = {(r["side"], r["context"]): r for r in first["rows"] if r["depth"] == "all"}
    for context in (230, 260):
        assert by_side["dense", context]["sparsity"] == 0
        ours = by_side["pruned", context]["sparsity"]
        assert ours > 0.05
        # policies hold as many tokens
        assert by_side["h2o", context]["sparsity"] == pytest.approx(ours, abs=0.01)
    files = sorted(file.name for file in (tmp_path / "o").iterdir())
    assert files == [f"recall.{end}" for end in ("json", "png", "points.json", "svg")]
    kept = (tmp_path / "o/recall.points.json").read_text()
    # points in the file are not measured again: an edited score comes back
    (tmp_path / "o/recall.points.json").write_text(kept.replace('"score": 0.0', '"score": 1.0'))
    again = json.loads(cli(*args, "--json"))
    assert {row["score"] for row in again["rows"]} == {1.0}
    assert again["repeats"] == first["repeats"]
    out = cli(*args)
    for word in ("task", "right", "log p", "tokens back", "streaming", "/ dense"):
        assert word in out
    widths = {len(line) for line in out.splitlines() if line.startswith("│ needle")}
    assert len(widths) == 1
    with pytest.raises(PruneError, match="measured with samples = 2, now it is 3"):
        cli(*args, "--samples", 3)


def test_the_dense_model_can_be_left_out(root):
    args = [root / "model", "--adapter", root / "adapter", "--text", root / "text.txt", "--tasks",
            "needle,repeats", "--contexts", 230, "--depths", "0.5", "--samples", 1]  # fmt: skip
    got = json.loads(cli(*args, "--policies", "keynorm", "--no-dense", "--json"))
    for rows in (got["rows"], got["repeats"]):
        assert {row["side"] for row in rows} == {"pruned", "keynorm"}
    assert {row["ratio"] for row in got["repeats"]} == {None}


def test_the_dense_model_alone_and_policies_with_a_budget(root):
    args = [root / "model", "--text", root / "text.txt", "--tasks", "needle", "--contexts", 300,
            "--depths", "0.5", "--samples", 1, "--json"]  # fmt: skip
    rows = json.loads(cli(*args, "--policies", "streaming", "--budget", 0.2))["rows"]
    held = {row["side"]: 300 * (1 - row["sparsity"]) for row in rows if row["depth"] == "all"}
    assert held == pytest.approx({"dense": 300, "streaming": 60})
    with pytest.raises(PruneError, match="sets no size for policies; pass --budget"):
        cli(*args, "--policies", "streaming")


def test_a_full_model_is_asked_beside_its_base(root):
    args = ["--text", root / "text.txt", "--tasks", "needle", "--contexts", 300, "--depths", "0.5",
            "--samples", 1, "--json"]  # fmt: skip
    full = json.loads(cli(root / "whole", *args, "--policies", "streaming"))["rows"]
    alone = json.loads(cli(root / "model", *args))["rows"]
    by_side = {row["side"]: row for row in full if row["depth"] == "all"}
    assert set(by_side) == {"pruned", "dense", "streaming"}
    assert by_side["dense"]["log_p"] == pytest.approx(alone[-1]["log_p"], rel=1e-5)


def test_bad_input_is_one_clear_line(root, haystack):
    def fails(match, *args):
        with pytest.raises(PruneError, match=match):
            cli(root / "model", "--text", root / "text.txt", *args)

    fails("task 'poetry' is unknown; there are needle", "--tasks", "poetry")
    fails("baseline 'best' is unknown", "--policies", "best", "--budget", 9)
    fails("do not fit into the 600 positions", "--contexts", 590)
    fails("task needle needs 195 tokens with this tokenizer, and a context has 100",
          "--tasks", "needle", "--contexts", 100)  # fmt: skip
    fails("depth 1.5 must be from 0", "--depths", "1.5")
    fails("no chat template; leave out --chat", "--chat")
    short = Haystack(haystack.tokenizer, "Too short.")
    with pytest.raises(PruneError, match="are needed to hide things in; pass a longer one"):
        short.prompt("needle", 400, 0.5, 0)
