"""What every connector promises (`kvstore.tier.base`), over each that ships and the example of the documentation.

Each block of a test's memory holds bytes made from its name, so a block in the wrong place is seen at once.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import cast

import pytest

from kvstore.blocks import block_names, namespace_root
from kvstore.errors import ConfigError
from kvstore.geometry import KVGeometry, KVGroup
from kvstore.tensors import KVMemory
from kvstore.tier.base import Connector, Prefix, Save
from kvstore.tier.registry import TierOptions, make_connector

SIZE = 16
LAYERS = 3
BLOCKS = 64
CHUNK = 2  # blocks of a chunk, for connectors that keep chunks
WAIT_S = 20.0
NAMES = ["host", "docs.examples.dict_connector:DictConnector", "lmcache"]


class Rig:
    """A connector over a memory whose blocks are given out one after another."""

    def __init__(self, connector: Connector, memory: KVMemory) -> None:
        self.connector = connector
        self.memory = memory
        self._saves = 0
        self._next = 0

    def take(self, count: int) -> list[int]:
        """Blocks that nobody uses, in no order."""
        blocks = [(7 * i) % BLOCKS for i in range(self._next, self._next + count)]
        self._next += count
        assert self._next <= BLOCKS
        return blocks

    def write(self, names: Sequence[bytes], blocks: Sequence[int]) -> None:
        for name, block in zip(names, blocks, strict=True):
            for layer in range(LAYERS):
                self.memory.block(0, layer, block)[:] = content(name, layer, self.memory)

    def holds(self, names: Sequence[bytes], blocks: Sequence[int]) -> bool:
        pairs = [(n, b, layer) for n, b in zip(names, blocks, strict=True) for layer in range(LAYERS)]
        return all(self.memory.block(0, layer, b) == content(n, layer, self.memory) for n, b, layer in pairs)

    def is_blank(self, blocks: Sequence[int]) -> bool:
        return all(not any(self.memory.block(0, layer, b)) for b in blocks for layer in range(LAYERS))

    def until(self, is_so: object) -> None:
        """Poll, as the step loop does, until the function says True."""
        end = time.monotonic() + WAIT_S
        while not is_so():  # type: ignore[operator]
            assert time.monotonic() < end, "the connector does not come to an end"
            wait = self.connector.poll()
            time.sleep(min(wait or 0.001, 0.01))

    def save(self, prefix: Prefix, first: int, blocks: Sequence[int]) -> None:
        """Save, and wait until the blocks are not read any more."""
        self._saves += 1
        number, told = self._saves, list[int]()
        for layer in range(LAYERS):
            self.connector.save_layer(Save(number, prefix, first, blocks), layer)
        self.until(lambda: told.extend(self.connector.saved()) or number in told)
        assert told == [number]

    def keep(self, prefix: Prefix) -> None:
        """Write all blocks of a prefix somewhere and save them."""
        blocks = self.take(len(prefix.names))
        self.write(prefix.names, blocks)
        self.save(prefix, 0, blocks)

    def lookup(self, seq_id: str, prefix: Prefix) -> int:
        """What a look-up answers in the end."""
        answers: list[int | None] = [None]
        self.until(lambda: answers.append(self.connector.lookup(seq_id, prefix)) or answers[-1] is not None)
        return cast(int, answers[-1])

    def depth(self, prefix: Prefix) -> int:
        found = self.lookup("?", prefix)
        assert self.connector.finish("?")
        return found

    def reserve(self, seq_id: str, prefix: Prefix, first: int, count: int) -> int:
        self.lookup(seq_id, prefix)
        return self.connector.reserve(seq_id, prefix, first, count)

    def load(self, seq_id: str, prefix: Prefix, first: int, blocks: Sequence[int]) -> int:
        """Load into blocks, those of the prefix from ``first`` on; returns how many arrived."""
        if not (count := self.reserve(seq_id, prefix, first, len(blocks))):
            assert self.connector.finish(seq_id)
            return 0
        assert count <= len(blocks)
        self.connector.start_load(seq_id, blocks[:count])
        self.until(lambda: self.connector.wait_layer(seq_id, LAYERS - 1))
        bad = self.connector.errors(seq_id)
        assert bad <= set(blocks[:count])
        assert self.connector.finish(seq_id)
        return next((i for i, block in enumerate(blocks[:count]) if block in bad), count)


def content(name: bytes, layer: int, memory: KVMemory) -> bytes:
    size = memory.geometry.groups[0].block_bytes
    seed = blake2b(name + bytes([layer]), digest_size=64).digest()
    return (seed * (size // 64 + 1))[:size]


def prefix(tokens: Sequence[int], salt: str = "", model: str = "m", dtype: str = "float32") -> Prefix:
    root = namespace_root(salt=salt, model=model, tokenizer="t", dtype=dtype, block_size=SIZE, layout_version=1)
    return Prefix(root, tuple(tokens), tuple(block_names(tokens, SIZE, root)))


def prompt(num_blocks: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(1000) for _ in range(num_blocks * SIZE + 5)]


@pytest.fixture(params=NAMES)
def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    if request.param == "lmcache":
        pytest.importorskip("lmcache", reason="LMCache is not installed; make setup does it")
        monkeypatch.setenv("LMCACHE_TRACK_USAGE", "false")
    group = KVGroup(num_layers=LAYERS, num_kv_heads=2, head_dim=8, block_size=SIZE, dtype="float32")
    memory = KVMemory.create(KVGeometry(groups=(group,), num_blocks=(BLOCKS,)))
    options = TierOptions(host_bytes=64 << 20, chunk_tokens=CHUNK * SIZE, model="m")
    connector = make_connector(request.param, memory, options)
    assert connector is not None
    yield Rig(connector, memory)
    connector.close()
    memory.close()


def test_an_empty_connector_has_nothing(rig: Rig) -> None:
    p = prefix(prompt(4))
    assert rig.depth(p) == 0
    assert rig.reserve("a", p, 0, 4) == 0
    assert rig.connector.finish("a")
    assert rig.connector.poll() is None


def test_what_was_saved_comes_back_byte_for_byte_into_other_blocks(rig: Rig) -> None:
    p = prefix(prompt(8))
    rig.keep(p)
    assert rig.depth(p) == 8
    blocks = rig.take(8)
    assert rig.load("a", p, 0, blocks) == 8
    assert rig.holds(p.names, blocks)
    rig.until(lambda: rig.connector.poll() is None)


def test_only_the_blocks_that_were_asked_for_are_written(rig: Rig) -> None:
    p = prefix(prompt(8))
    rig.keep(p)
    blocks = rig.take(8)
    assert rig.load("a", p, 3, blocks[3:6]) == 3
    assert rig.holds(p.names[3:6], blocks[3:6])
    assert rig.is_blank([*blocks[:3], *blocks[6:]])


def test_a_longer_prompt_finds_its_saved_part_and_a_parting_one_what_is_common(rig: Rig) -> None:
    saved, other = prompt(8), prompt(8, seed=1)
    rig.keep(prefix(saved))
    assert rig.depth(prefix(saved + other)) == 8
    parting = prefix(saved[: 4 * SIZE] + other)
    assert rig.depth(parting) == 4
    blocks = rig.take(8)
    assert rig.load("a", parting, 0, blocks[:8]) == 4
    assert rig.holds(parting.names[:4], blocks[:4])


@pytest.mark.parametrize("other", [{"salt": "b"}, {"salt": "m"}, {"model": "m2"}, {"dtype": "bfloat16"}])
def test_nothing_crosses_from_one_namespace_to_another(rig: Rig, other: dict[str, str]) -> None:
    tokens = prompt(4)
    rig.keep(prefix(tokens))
    assert rig.depth(prefix(tokens, **other)) == 0
    assert rig.load("a", prefix(tokens, **other), 0, rig.take(4)) == 0
    rig.keep(prefix(tokens, **other))
    blocks = rig.take(4)
    assert rig.load("b", prefix(tokens), 0, blocks) == 4
    assert rig.holds(prefix(tokens).names, blocks)


def test_a_save_goes_on_where_the_last_one_ended(rig: Rig) -> None:
    p = prefix(prompt(8))
    blocks = rig.take(8)
    rig.write(p.names, blocks)
    rig.save(p, 0, blocks[:4])
    assert rig.depth(p) == 4
    rig.save(p, 4, blocks[4:])
    assert rig.depth(p) == 8
    rig.save(p, 0, blocks)  # again, all of it
    assert rig.depth(p) == 8
    target = rig.take(8)
    assert rig.load("a", p, 0, target) == 8
    assert rig.holds(p.names, target)


def test_blocks_may_be_overwritten_once_they_are_saved(rig: Rig) -> None:
    p = prefix(prompt(4))
    blocks = rig.take(4)
    rig.write(p.names, blocks)
    rig.save(p, 0, blocks)
    rig.write([b"other"] * 4, blocks)
    assert rig.load("a", p, 0, blocks) == 4
    assert rig.holds(p.names, blocks)


def test_an_abort_ends_with_blocks_that_nobody_writes(rig: Rig) -> None:
    p = prefix(prompt(8))
    rig.keep(p)
    for when in ("before reserve", "reserved", "started", "loaded"):
        blocks = rig.take(8)
        if when != "before reserve":
            assert rig.reserve(when, p, 0, 8) == 8
        if when in ("started", "loaded"):
            rig.connector.start_load(when, blocks)
        if when == "loaded":
            rig.until(lambda: rig.connector.wait_layer("loaded", LAYERS - 1))
        if not rig.connector.abort(when):
            told = list[str]()
            rig.until(lambda told=told, when=when: told.extend(rig.connector.fenced()) or when in told)
            assert told == [when]
        rig.write([b"next owner"] * 8, blocks)
        for _ in range(3):
            rig.connector.poll()
        assert rig.holds([b"next owner"] * 8, blocks)
    assert rig.depth(p) == 8


def test_two_sequences_may_load_the_same_at_once(rig: Rig) -> None:
    p = prefix(prompt(8))
    rig.keep(p)
    blocks = {seq_id: rig.take(8) for seq_id in "ab"}
    for seq_id in "ab":
        assert rig.reserve(seq_id, p, 0, 8) == 8
    for seq_id in "ab":
        rig.connector.start_load(seq_id, blocks[seq_id])
    for seq_id in "ab":
        rig.until(lambda seq_id=seq_id: rig.connector.wait_layer(seq_id, LAYERS - 1))
        assert not rig.connector.errors(seq_id)
        assert rig.connector.finish(seq_id)
        assert rig.holds(p.names, blocks[seq_id])


def test_a_sequence_that_was_only_looked_up_ends_without_a_trace(rig: Rig) -> None:
    p = prefix(prompt(4))
    rig.keep(p)
    for _ in range(2):
        rig.connector.lookup("a", p)
        assert rig.connector.finish("a")
        assert rig.connector.abort("a")
    rig.until(lambda: rig.connector.poll() is None)
    assert rig.load("a", p, 0, rig.take(4)) == 4


def test_random_saves_and_loads_never_give_what_is_not_right(rig: Rig) -> None:
    source = random.Random(7)
    trunk = prompt(8)
    saved: set[bytes] = set()
    free = [(7 * i) % BLOCKS for i in range(BLOCKS)]
    for turn in range(40):
        cut = source.choice([0, 2, 4, 8])
        branch = source.randrange(3)
        p = prefix(trunk[: cut * SIZE] + prompt(8 - cut, seed=branch + 10), salt=source.choice(["", "x"]))
        source.shuffle(free)
        if source.random() < 0.5:
            first = source.choice([0, 2, 4])
            stop = source.choice([s for s in (4, 8) if s > first])
            blocks = free[: stop - first]
            rig.write(p.names[first:stop], blocks)
            rig.save(p, first, blocks)
            saved.update(p.names[first:stop])
        else:
            first = source.choice([0, 1, 3])
            blocks = free[: source.randint(1, 8 - first)]
            count = rig.load(f"s{turn}", p, first, blocks)
            assert rig.holds(p.names[first : first + count], blocks[:count])
            assert saved.issuperset(p.names[first : first + count])
        assert all(name in saved for name in p.names[: rig.depth(p)])


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere", "off, host, lmcache"),
        ("nowhere:Class", "cannot be loaded"),
        ("kvstore.tier.base:Nothing", "cannot be loaded"),
        ("kvstore.pool:BlockPool", "has no reserve, start_load"),
    ],
)
def test_what_is_no_connector_is_refused_with_the_reason(name: str, says: str) -> None:
    group = KVGroup(num_layers=1, num_kv_heads=1, head_dim=8, block_size=SIZE, dtype="float32")
    memory = KVMemory.create(KVGeometry(groups=(group,), num_blocks=(2,)))
    with pytest.raises(ConfigError, match=f"tier.connector.*{says}"):
        make_connector(name, memory, TierOptions())
    assert make_connector("off", memory, TierOptions()) is None
    memory.close()


def test_a_package_registers_a_connector_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = tmp_path / "mystore-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mystore\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[pdray.connectors]\nmystore = {NAMES[1]}\n")
    monkeypatch.syspath_prepend(tmp_path)
    group = KVGroup(num_layers=1, num_kv_heads=1, head_dim=8, block_size=SIZE, dtype="float32")
    memory = KVMemory.create(KVGeometry(groups=(group,), num_blocks=(2,)))
    connector = make_connector("mystore", memory, TierOptions())
    assert type(connector).__name__ == "DictConnector"
    with pytest.raises(ConfigError, match="host, lmcache, mystore"):
        make_connector("other", memory, TierOptions())
    memory.close()
