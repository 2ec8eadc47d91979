"""Decode steps in sequence, each compared with a loop over rows, tokens and heads."""

import torch

from kvprune.cache.extents import ExtentTable
from kvprune.cache.slots import SlotTable
from kvprune.ops.decode import NewToken, Votes, decode
from kvprune.ops.form import AttentionForm
from poisoned_memory import poisoned

# float32 noise; for half precisions the rounding of the output and of torch's attention weights
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 3e-3}


class Oracle:
    """The slowest obvious version: a dict of tokens per row, float64, one head at a time."""

    def __init__(self, rows):
        self.rows = [{} for _ in range(rows)]  # token number → (key, value, key_int)

    def step(self, new, form, votes, also=()):
        query, key, value, token, active, _ = new
        B, Hq = query.shape[:2]
        active = [True] * B if active is None else active
        G = Hq // key.shape[1]
        output, left = torch.empty(B, Hq, value.shape[-1], dtype=torch.float64), []
        for b, row in enumerate(self.rows):
            now = int(token[b])
            left.append({t for t in row if active[b] and self.loses(row, t, now, b, votes, also)})
            for t in left[b]:
                del row[t]
            if active[b]:
                row[now] = (key[b, :, 0], value[b, :, 0], votes and votes.key_int[b])
            seen = list(row.values()) if active[b] else [(key[b, :, 0], value[b, :, 0], None)]
            k = torch.stack([x[0] for x in seen]).double()  # (n, H, D)
            v = torch.stack([x[1] for x in seen]).double()
            for h in range(Hq):
                logit = k[:, h // G] @ query[b, h, 0].double() * form.scaling
                if form.softcap:
                    logit = form.softcap * torch.tanh(logit / form.softcap)
                output[b, h] = logit.softmax(0) @ v[:, h // G]
        return output[:, :, None], left

    @staticmethod
    def loses(row, t, now, b, votes, also):
        if (b, t) in also:
            return True
        if votes is None or t < votes.protect_first or now - t <= votes.protect_recent:
            return False
        score = float(votes.query_int[b].double() @ row[t][2].double())
        return score + votes.beta <= votes.threshold


def held(table):
    return [set(t[ok].tolist()) for t, ok in zip(*table.members(), strict=True)]


def new_table(store, *shape, **options):
    if store == "slots":
        return SlotTable(*shape, **options)
    # exactly what was inserted comes out again: other forms have tests of their own
    return ExtentTable(*shape, key_int="float32", **options)


def leavers(decoded):
    return [set(row.tolist()) - {-1} for row in decoded.dropped]


def check_contents(table, oracle):
    """Slot by slot, what the table holds is bit for bit what was inserted."""
    slots = table.get()
    for b, row in enumerate(oracle.rows):
        for s in slots.valid[b].nonzero()[:, 0].tolist():
            key, value, key_int = row[int(slots.token[b, s])]
            assert slots.keys[b, :, s].equal(key)
            assert slots.values[b, :, s].equal(value)
            assert key_int is None or slots.key_int[b, s].equal(key_int)


def run(backend, dtype, store, steps, B=3, H=2, G=1, D=16, Dv=None, R=8, seed=0, idle=0.0, **rules):
    """Many steps in sequence, each compared; returns the table and how many tokens left it."""
    random = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=random)

    Dv = Dv or D
    form = AttentionForm(D**-0.5, rules.pop("softcap", None))
    voting = rules.pop("voting", True)
    gone = 0
    with poisoned():
        table = new_table(store, B, H, D, value_dim=Dv, rank=R, dtype=dtype)
        oracle = Oracle(B)
        seen = torch.zeros(B, dtype=torch.int64)
        for _ in range(steps):
            query, key = randn(B, H * G, 1, D).to(dtype), randn(B, H, 1, D).to(dtype)
            value = randn(B, H, 1, Dv).to(dtype)
            votes = (
                Votes(randn(B, R) / R**0.5, randn(B, R), **{"beta": 2.0, **rules})
                if voting
                else None
            )
            active = torch.rand(B, generator=random) >= idle
            new = NewToken(query, key, value, seen, active if idle else None)
            got = decode(table, new, form, votes=votes, backend=backend)
            want, left = oracle.step(new, form, votes)
            assert got.output.dtype == dtype
            torch.testing.assert_close(
                got.output.double(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
            )
            assert leavers(got) == left
            assert held(table) == [set(row) for row in oracle.rows]
            gone += sum(map(len, left))
            seen = seen + active
        check_contents(table, oracle)
    assert int(table.kept.max()) == max(map(len, oracle.rows))
    return table, gone
