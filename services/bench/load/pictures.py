"""Prompts with pictures, as recipes: a size and a key, from which the same JPEG comes each time.

A picture is coarse noise, scaled up: no two keys look alike, and a file is about as large as a photograph's.
"""

from __future__ import annotations

import ast
import base64
import dataclasses
import io
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvstore.errors import ConfigError
from services.bench.load.workloads import Item, Picture, RandomLengths

GRAIN = 8  # pixels of a noise cell
QUALITY = 85
_COUNTS, _SIZES, _PICTURE = 8, 9, 10
"""First number after the seed: of how many pictures, of their sizes, of what they show."""
Size = tuple[int, int]
"""Height and width in pixels."""


def data_url(picture: Picture) -> str:
    """The picture as a ``data:`` URL of a JPEG. Raises ConfigError where Pillow is not installed."""
    return f"data:image/jpeg;base64,{base64.b64encode(jpeg(picture)).decode('ascii')}"


def jpeg(picture: Picture) -> bytes:
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError("pictures need Pillow: pip install 'pdray[bench]'") from None
    cells = (-(-picture.height // GRAIN), -(-picture.width // GRAIN), 3)
    noise = np.random.default_rng(picture.key).integers(0, 256, size=cells, dtype=np.uint8)
    out = io.BytesIO()
    shown = Image.fromarray(noise).resize((picture.width, picture.height), Image.Resampling.BICUBIC)
    shown.save(out, "JPEG", quality=QUALITY)
    return out.getvalue()


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomPictures:
    """`RandomLengths`, each prompt with pictures of its own.

    Their number is uniform within ``range_ratio`` of ``per_request``; ``sizes`` gives the probability of each size.
    """

    lengths: RandomLengths
    per_request: int = 1
    range_ratio: float = 0.0
    sizes: Mapping[Size, float]

    def __post_init__(self) -> None:
        if not 0 <= self.range_ratio <= 1:
            raise ConfigError(f"--random-mm-num-mm-items-range-ratio must be from 0 to 1, got {self.range_ratio}")

    def items(self, count: int, seed: int) -> list[Item]:
        spread = round(self.per_request * self.range_ratio)
        counts = np.random.default_rng((seed, _COUNTS)).integers(
            self.per_request - spread, self.per_request + spread + 1, size=count
        )
        rng, sizes = np.random.default_rng((seed, _SIZES)), list(self.sizes)
        weights = np.array([self.sizes[size] for size in sizes])
        made = []
        for i, item in enumerate(self.lengths.items(count, seed)):
            drawn = rng.choice(len(sizes), size=int(counts[i]), p=weights / weights.sum())
            pictures = tuple(Picture(*sizes[int(d)], key=(seed, _PICTURE, i, k)) for k, d in enumerate(drawn))
            made.append(dataclasses.replace(item, pictures=pictures))
        return made


def parse_sizes(text: str) -> dict[Size, float]:
    """``{(256, 256, 1): 0.5, (720, 1280, 1): 0.5}``: height, width, frames (1) and the probability of each.

    Raises:
        ConfigError: it is nothing of that kind.
    """
    wrong = ConfigError(f"--random-mm-bucket-config {text}: give it as {{(HEIGHT, WIDTH, 1): PROBABILITY, …}}")
    try:
        given = ast.literal_eval(text)
        sizes = {(h, w): float(p) for (h, w, frames), p in given.items() if frames == 1}
    except (ValueError, SyntaxError, TypeError, AttributeError):
        raise wrong from None
    whole = all(isinstance(x, int) and 0 < x <= 16384 for size in sizes for x in size)
    if len(sizes) != len(given) or not whole or min(sizes.values(), default=-1) < 0 or not sum(sizes.values()) > 0:
        raise wrong
    return sizes
