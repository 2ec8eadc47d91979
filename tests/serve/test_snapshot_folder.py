"""Snapshots in a folder: found by exact tokens, whole or not at all, and within the limit."""

import os
import shutil
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from kvprune import PruneError, Snapshot
from kvprune.serve.prefixes import SHORTEST
from kvprune.serve.seal import PLAIN, Damaged, Seal
from kvprune.serve.snapshot_folder import Origin, SnapshotFolder

SECRET = "0123456789abcdef" * 2
MARK = b"these bytes are what a row holds" * 8
ORIGIN = Origin({"model": "m", "method.threshold": 0.0, "dtype": "float32"})
TEXT = list(range(100, 100 + 3 * SHORTEST))
MUCH = 10**9


def row(tokens, origin=ORIGIN):
    """A snapshot whose contents can be recognised."""
    states = tuple(
        {
            "keys": torch.frombuffer(bytearray(MARK), dtype=torch.int8).clone(),
            "token": torch.arange(len(tokens), dtype=torch.int32),
        }
        for _ in range(2)
    )
    return Snapshot(len(tokens), states, (), dict(origin.fingerprint), {})


def url_of(path, store):
    return path.as_uri() if store == "file" else f"memory://{path.name}"


@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "encrypted"])
@pytest.mark.parametrize("store", ["file", "memory"])
def test_the_longest_of_exactly_these_tokens(tmp_path, store, secret):
    folder = SnapshotFolder(url_of(tmp_path, store), MUCH, secret)
    other = SnapshotFolder(url_of(tmp_path, store), MUCH, secret)
    assert folder.find(TEXT, ORIGIN) is None
    for length in (SHORTEST, 2 * SHORTEST):
        assert folder.put(TEXT[:length], ORIGIN, row(TEXT[:length]))
        assert not folder.put(TEXT[:length], ORIGIN, row(TEXT[:length]))
    found = other.find(TEXT, ORIGIN)
    assert found.tokens == 2 * SHORTEST
    assert bytes(found.layers[1]["keys"].numpy()) == MARK
    assert found.fingerprint == ORIGIN.fingerprint
    # one token must be left to read
    assert other.find(TEXT[: 2 * SHORTEST], ORIGIN).tokens == SHORTEST
    assert other.find(TEXT[:SHORTEST], ORIGIN) is None
    assert other.find(TEXT, ORIGIN, longer_than=2 * SHORTEST) is None
    changed = [*TEXT[:50], 7, *TEXT[51:]]
    assert other.find(changed, ORIGIN).tokens == SHORTEST
    for origin in (
        ORIGIN._replace(salt="x"), ORIGIN._replace(recorded=True),
        ORIGIN._replace(fingerprint=ORIGIN.fingerprint | {"method.threshold": 0.5}),
    ):  # fmt: skip
        assert other.find(TEXT, origin) is None


def files(path):
    return [file for file in path.rglob("*") if file.is_file()]


def test_what_is_encrypted_tells_nothing(tmp_path):
    plain, hidden = tmp_path / "plain", tmp_path / "hidden"
    for folder, secret in ((plain, None), (hidden, SECRET)):
        SnapshotFolder(str(folder), MUCH, secret).put(TEXT, ORIGIN, row(TEXT))
    (open_file,), (file,) = files(plain), files(hidden)
    assert MARK in open_file.read_bytes()
    assert MARK[:8] not in file.read_bytes()
    assert b"method" not in file.read_bytes()
    assert file.name != open_file.name
    assert file.parent.name != open_file.parent.name
    # the same text twice is not the same bytes
    first = file.read_bytes()
    file.unlink()
    SnapshotFolder(str(hidden), MUCH, SECRET).put(TEXT, ORIGIN, row(TEXT))
    assert file.read_bytes() != first
    assert plain.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "encrypted"])
def test_damage_is_a_miss(tmp_path, secret, said):
    folder = SnapshotFolder(str(tmp_path), MUCH, secret)
    folder.put(TEXT, ORIGIN, row(TEXT))
    (file,) = files(tmp_path)
    whole, text = file.read_bytes(), [*TEXT, 5]
    damaged = [whole[:at] for at in range(0, len(whole), 97)]
    for at in range(0, len(whole), 211):
        damaged.append(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    damaged += [whole + b"x", b"", b"{}" * 100]
    for data in damaged:
        said.clear()
        file.write_bytes(data)
        assert folder.find(text, ORIGIN) is None
        assert "is not used" in said[0]
    # what is damaged may be written again
    assert folder.put(TEXT, ORIGIN, row(TEXT))
    assert folder.find(text, ORIGIN).tokens == len(TEXT)
    assert not folder.put(TEXT, ORIGIN, row(TEXT))


def test_the_wrong_key(tmp_path, said):
    SnapshotFolder(str(tmp_path), MUCH, SECRET).put(TEXT, ORIGIN, row(TEXT))
    text = [*TEXT, 5]
    wrong = SnapshotFolder(str(tmp_path), MUCH, SECRET[::-1])
    assert wrong.find(text, ORIGIN) is None
    assert SnapshotFolder(str(tmp_path), MUCH).find(text, ORIGIN) is None
    # nor under a name of its own
    (file,) = files(tmp_path)
    name = wrong._name(TEXT, ORIGIN)
    (tmp_path / name).parent.mkdir()
    shutil.copy(file, tmp_path / name)
    assert wrong.find(text, ORIGIN) is None
    assert "KVPRUNE_SNAPSHOT_KEY is another" in said[-1]


def test_what_is_not_encrypted_is_refused_where_all_is(tmp_path, said):
    folder = SnapshotFolder(str(tmp_path), MUCH, SECRET)
    folder.put(TEXT, ORIGIN, row(TEXT))
    (file,) = files(tmp_path)
    name = folder._name(TEXT, ORIGIN)
    file.write_bytes(Seal().close(name, row(TEXT).to_bytes()))
    assert file.read_bytes().startswith(PLAIN)
    assert folder.find([*TEXT, 5], ORIGIN) is None
    assert "not encrypted as the others are" in said[-1]


def test_a_file_under_the_name_of_another(tmp_path):
    for secret in (None, SECRET):
        folder = SnapshotFolder(str(tmp_path), MUCH, secret)
        other = [*TEXT[:-1], 9]
        for tokens in (TEXT, other):
            folder.put(tokens, ORIGIN, row(tokens))
        own, theirs = (tmp_path / folder._name(tokens, ORIGIN) for tokens in (TEXT, other))
        shutil.copy(theirs, own)
        assert folder.find([*TEXT, 5], ORIGIN) is None
        assert folder.find([*other, 5], ORIGIN) is not None
    with pytest.raises(Damaged, match="checksum"):
        Seal().open("b", Seal().close("a", b"data"))


def texts(count):
    return [[number, *TEXT] for number in range(count)]


def test_the_least_recently_used_go(tmp_path):
    a, b, c, d = texts(4)
    size = _size_of_one(tmp_path / "one")
    folder = SnapshotFolder(str(tmp_path / "all"), 3 * size + size // 2)
    for tokens in (a, b, c):
        folder.put(tokens, ORIGIN, row(tokens))
        time.sleep(0.01)
    # another process uses the oldest
    other = SnapshotFolder(str(tmp_path / "all"), folder.limit)
    assert other.find([*a, 5], ORIGIN) is not None
    folder.put(d, ORIGIN, row(d))
    kept = [tokens for tokens in (a, b, c, d) if other.find([*tokens, 5], ORIGIN) is not None]
    assert kept == [a, c, d]
    # nobody else's files are touched, what a killed writer left goes
    keep = tmp_path / "all" / "a" / "b"
    keep.parent.mkdir()
    keep.write_bytes(b"x" * 10 * size)
    file = next(file for file in files(tmp_path / "all") if file != keep)
    left = file.with_name(f".{file.name}.abc")
    left.write_bytes(b"x" * size)
    os.utime(left, (1, 1))
    folder.put(b, ORIGIN, row(b))
    assert keep.exists()
    assert not left.exists()
    small = SnapshotFolder(str(tmp_path / "small"), size - 1)
    assert not small.put(a, ORIGIN, row(a))
    assert files(tmp_path / "small") == []


def _size_of_one(path):
    SnapshotFolder(str(path), MUCH).put(texts(1)[0], ORIGIN, row(texts(1)[0]))
    (file,) = files(path)
    return file.stat().st_size


def test_writers_side_by_side(tmp_path):
    size = _size_of_one(tmp_path / "one")
    limit, failed = 5 * size + size // 2, []

    def write(number):
        folder = SnapshotFolder(str(tmp_path / "all"), limit)
        try:
            for tokens in texts(12)[number::2]:
                folder.put(tokens, ORIGIN, row(tokens))
                folder.find([*tokens, 5], ORIGIN)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=write, args=[n % 2]) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    left = files(tmp_path / "all")
    assert sum(file.stat().st_size for file in left) <= limit
    assert not [file for file in left if file.name.startswith(".")]
    folder = SnapshotFolder(str(tmp_path / "all"), limit)
    readable = [t for t in texts(12) if folder.find([*t, 5], ORIGIN) is not None]
    assert len(readable) == len(left) > 0


def test_a_write_that_breaks_off_leaves_nothing(tmp_path, monkeypatch):
    folder = SnapshotFolder(str(tmp_path), MUCH)

    def full(descriptor):
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="no space left"):
        folder.put(TEXT, ORIGIN, row(TEXT))
    assert files(tmp_path) == []
    assert folder.find([*TEXT, 5], ORIGIN) is None


def test_what_cannot_be_used_is_said_at_once(tmp_path, monkeypatch):
    for url, words in (("nosuch://x", "nosuch"), ("s3://bucket/x", "s3fs")):
        with pytest.raises(PruneError, match=f"cannot be used.*{words}"):
            SnapshotFolder(url, MUCH)
    with pytest.raises(PruneError, match=r"has 5 characters and needs 32.*openssl rand"):
        SnapshotFolder(str(tmp_path), MUCH, "short")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(PruneError, match=r"kvprune\[snapshots\]"):
        SnapshotFolder(str(tmp_path), MUCH)


def test_the_key_is_that_of_the_standard():
    """HKDF-SHA256 as the library has it."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    from kvprune.serve.seal import _derive

    for purpose in (b"encrypt", b"name"):
        want = HKDF(SHA256(), 32, None, b"kvprune snapshots 1 " + purpose)
        assert _derive(SECRET, purpose) == want.derive(SECRET.encode())


def test_a_relative_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    SnapshotFolder("here", MUCH).put(TEXT, ORIGIN, row(TEXT))
    assert files(Path("here"))
