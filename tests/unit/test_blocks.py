from __future__ import annotations

import itertools
import os
import subprocess
import sys
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.blocks import NAME_BYTES, block_names, extend_name, namespace_root

FIELDS = {
    "salt": "tenant-a",
    "model": "m" * 8,
    "tokenizer": "t" * 8,
    "dtype": "bfloat16",
    "block_size": 16,
    "layout_version": 1,
}
ROOT = namespace_root(**FIELDS)
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=70)


def spelled_out_name(parent: bytes, token_ids: list[int], extra: list[tuple[str, bytes]]) -> bytes:
    """The definition, byte by byte."""
    data = parent + len(token_ids).to_bytes(4, "little")
    for token in token_ids:
        data += token.to_bytes(4, "little")
    data += len(extra).to_bytes(4, "little")
    for kind, value in sorted(extra):
        data += len(kind.encode()).to_bytes(4, "little") + kind.encode()
        data += len(value).to_bytes(4, "little") + value
    return blake2b(data, digest_size=16, person=b"pdray.block.v1").digest()


def test_names_are_the_same_bytes_as_ever() -> None:
    names = block_names(list(range(1000, 1050)), 16, ROOT)
    assert ROOT.hex() == "1586454d1a7b2b931b7312ca31ee1cb9"
    assert [name.hex() for name in names] == [
        "cca570b9ed903d2cdc02d8874e226e40",
        "b7ac3c9ce990891f97e03eed11eb975e",
        "91df643e3a0254bf0e839d9c0bc47bbf",
    ]
    image = extend_name(names[0], range(16), [("image", b"\x01" * 16 + b"@3"), ("adapter", b"lora-7")])
    assert image.hex() == "f4c4e97fba6705ef77c1654a2774b61d"


def test_names_do_not_depend_on_the_process() -> None:
    code = (
        "from kvstore.blocks import *;"
        f"r = namespace_root(**{FIELDS!r});"
        "print(r.hex(), *[n.hex() for n in block_names(list(range(90)), 16, r)])"
    )
    root = Path(__file__).parents[2]
    answers = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("0", "1", "12345")
    }
    assert answers == {" ".join([ROOT.hex(), *(n.hex() for n in block_names(range(90), 16, ROOT))]) + "\n"}


@given(tokens, st.integers(1, 20))
def test_names_follow_their_definition(token_ids: list[int], block_size: int) -> None:
    parent, expected = ROOT, []
    for start in range(0, len(token_ids) // block_size * block_size, block_size):
        parent = spelled_out_name(parent, token_ids[start : start + block_size], [])
        expected.append(parent)
    assert block_names(token_ids, block_size, ROOT) == expected
    assert block_names(np.asarray(token_ids, dtype=np.int64), block_size, ROOT) == expected


@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=9),
    st.lists(st.tuples(st.sampled_from(["image", "adapter", "a", ""]), st.binary(max_size=6)), max_size=3),
)
def test_extra_keys_are_part_of_a_name_in_any_order(token_ids: list[int], extra: list[tuple[str, bytes]]) -> None:
    expected = spelled_out_name(ROOT, token_ids, extra)
    for order in itertools.permutations(extra):
        assert extend_name(ROOT, token_ids, order) == expected


@given(tokens, tokens)
def test_a_shared_name_means_a_shared_prefix(a: list[int], b: list[int]) -> None:
    shared = sum(x == y for x, y in zip(block_names(a, 4, ROOT), block_names(b, 4, ROOT), strict=False))
    equal = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    assert shared == len(list(equal)) // 4


def test_fields_cannot_be_moved_into_their_neighbours() -> None:
    names = {
        extend_name(ROOT, [1], [("ab", b"c")]),
        extend_name(ROOT, [1], [("a", b"bc")]),
        extend_name(ROOT, [1], [("a", b""), ("b", b"c")]),
        extend_name(ROOT, [1], []),
        extend_name(ROOT, [1, 0], []),
        extend_name(ROOT, [1, 1], []),
    }
    assert len(names) == 6
    roots = {
        ROOT,
        namespace_root(**{**FIELDS, "salt": "tenant-am", "model": "m" * 7}),
        namespace_root(**{**FIELDS, "salt": "", "model": "tenant-a" + "m" * 8}),
        namespace_root(**{**FIELDS, "salt": "m" * 8, "model": "tenant-a"}),
    }
    assert len(roots) == 4


@pytest.mark.parametrize("field", list(FIELDS))
def test_every_field_of_the_namespace_separates(field: str) -> None:
    value = FIELDS[field]
    other = namespace_root(**{**FIELDS, field: value + 1 if isinstance(value, int) else value + "x"})
    assert len(other) == NAME_BYTES
    assert other != ROOT


def test_a_block_cannot_pose_as_a_root() -> None:
    assert extend_name(ROOT, [1]) != namespace_root(**FIELDS)
    assert block_names([1], 1, extend_name(ROOT, [1])) == [extend_name(extend_name(ROOT, [1]), [1])]


def test_only_full_blocks_have_names() -> None:
    assert block_names([], 16, ROOT) == []
    assert block_names(range(15), 16, ROOT) == []
    assert len(block_names(range(31), 16, ROOT)) == 1
    assert len(block_names(range(32), 16, ROOT)) == 2


@pytest.mark.parametrize("bad", [[-1], [2**32], [2**70], np.asarray([-1]), np.asarray([2**40])])
def test_ids_outside_four_bytes_are_refused(bad: list[int]) -> None:
    with pytest.raises(ValueError, match="token ids must lie in"):
        block_names(bad, 1, ROOT)
    with pytest.raises(ValueError, match="token ids must lie in"):
        extend_name(ROOT, bad)


def test_a_parent_that_is_no_name_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        extend_name(b"", [1])
    with pytest.raises(ValueError, match="16 bytes"):
        block_names([1], 1, ROOT + b"x")


def test_an_empty_block_has_no_name() -> None:
    with pytest.raises(ValueError, match="without tokens"):
        extend_name(ROOT, [])
    with pytest.raises(ValueError, match="block_size"):
        block_names([1], 0, ROOT)
    with pytest.raises(ValueError, match="block_size"):
        namespace_root(**{**FIELDS, "block_size": 0})
