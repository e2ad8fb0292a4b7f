"""The world of tiny-video: one coloured shape that moves straight across a plain background.

A clip is a Scene; `draw` paints scenes, `describe` words them, `read` tells from frames alone what they show.
Whether a scene's combination of colour, shape and direction is held out is decided by hash, so no held-out
combination was ever seen in training, in any size, place or wording.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

SIZE = 64  # pixels, square
NUM_FRAMES = 17  # 4n + 1
HELD_OUT_SHARE = 6  # one combination in so many is held out

COLOURS = {
    "red": (225, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 230),
    "yellow": (245, 225, 50),
    "purple": (160, 60, 200),
    "orange": (245, 135, 25),
}
BACKGROUNDS = {"black": (0, 0, 0), "gray": (128, 128, 128), "white": (255, 255, 255)}
SHAPES = ("circle", "square", "triangle")
DIRECTIONS = {"right": (1, 0), "left": (-1, 0), "up": (0, -1), "down": (0, 1)}
SIZES = {"small": (7.0, 8.5), "large": (12.0, 14.0), "": (8.0, 13.0)}  # radius, pixels

_PREFIXES = ("", "", "", "a video of ", "a clip of ", "show ")
_ARTICLES = ("a", "a", "the", "one")
_VERBS = ("moving", "moves", "sliding", "slides", "flying", "flies", "drifting", "drifts", "going", "goes")
_WAYS = {
    "right": ("right", "to the right", "rightwards"),
    "left": ("left", "to the left", "leftwards"),
    "up": ("up", "upwards", "to the top"),
    "down": ("down", "downwards", "to the bottom"),
}
_GROUNDS = ("on a {} background", "over a {} background", "on {}")

Frames = npt.NDArray[np.uint8]  # (T, H, W, 3)


@dataclass(frozen=True, slots=True)
class Scene:
    colour: str
    shape: str
    direction: str
    background: str = "black"
    size: str = ""

    @property
    def is_held_out(self) -> bool:
        identity = f"{self.colour} {self.shape} {self.direction}"
        return hashlib.sha256(identity.encode()).digest()[0] % HELD_OUT_SHARE == 0


def every_scene() -> list[Scene]:
    """Return one scene of each combination of colour, shape and direction."""
    return [Scene(c, s, d) for c in COLOURS for s in SHAPES for d in DIRECTIONS]


def random_scene(rng: random.Random, held_out: bool) -> Scene:
    while True:
        scene = Scene(
            rng.choice(list(COLOURS)),
            rng.choice(SHAPES),
            rng.choice(list(DIRECTIONS)),
            rng.choice(["black", "black", *BACKGROUNDS]),
            rng.choice(list(SIZES)),
        )
        if scene.is_held_out == held_out:
            return scene


def describe(scene: Scene, rng: random.Random | None = None) -> str:
    """Return words for a scene: the plainest, or with `rng` any of the wordings."""
    if rng is None:
        ground = "" if scene.background == "black" else f" on a {scene.background} background"
        return f"{_thing(scene, 'a')} moving {scene.direction}{ground}"
    thing = _thing(scene, rng.choice(_ARTICLES))
    core = f"{thing} {rng.choice(_VERBS)} {rng.choice(_WAYS[scene.direction])}"
    ground = rng.choice(_GROUNDS).format(scene.background)
    if scene.background == "black" and rng.random() < 0.6:
        return rng.choice(_PREFIXES) + core
    if rng.random() < 0.3:
        return f"{ground}, {core}"
    return f"{rng.choice(_PREFIXES)}{core} {ground}"


def _thing(scene: Scene, article: str) -> str:
    words = " ".join(filter(None, (scene.size, scene.colour, scene.shape)))
    return f"an {words}" if article == "a" and words[0] == "o" else f"{article} {words}"


def draw(scenes: list[Scene], num_frames: int, seed: int, device: str = "cpu") -> Any:
    """Return clips as a tensor (B, 3, T, 64, 64) of -1 to 1; the shape crosses 24 to 34 pixels in each."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def uniform(low: Any, high: Any) -> Any:
        return low + (high - low) * torch.rand(len(scenes), generator=generator)

    radii = torch.tensor([SIZES[scene.size] for scene in scenes])
    radius = uniform(radii[:, 0], radii[:, 1])
    way = uniform(24.0, 34.0).minimum(SIZE - 4 - 2 * radius)
    heading = torch.tensor([DIRECTIONS[scene.direction] for scene in scenes], dtype=torch.float32)
    centre = torch.stack([uniform(*_range(radius, way, heading[:, axis])) for axis in (0, 1)], -1)
    time = torch.linspace(-0.5, 0.5, num_frames) if num_frames > 1 else torch.zeros(1)
    paths = centre[:, None] + heading[:, None] * way[:, None, None] * time[None, :, None]  # (B, T, 2)
    kinds = torch.tensor([SHAPES.index(scene.shape) for scene in scenes])
    coverage = _coverage(kinds.to(device), paths.to(device), radius.to(device), SIZE)[:, None]  # (B, 1, T, H, W)
    colour, ground = (
        torch.tensor(rows, device=device)[:, :, None, None, None] / 127.5 - 1
        for rows in (
            [COLOURS[scene.colour] for scene in scenes],
            [BACKGROUNDS[scene.background] for scene in scenes],
        )
    )
    return ground + (colour - ground) * coverage


def _range(radius: Any, way: Any, heading: Any) -> tuple[Any, Any]:
    """Return where the middle of the path may lie on one axis, so that the shape stays inside."""
    margin = radius + 1 + heading.abs() * way / 2
    return margin, SIZE - margin


def draw_crowd(count: int, num_frames: int, side: int, seed: int, device: str = "cpu") -> Any:
    """Return clips of many shapes in any colours, (B, 3, T, side, side) of -1 to 1.

    Pictures without empty room: an autoencoder learns colours and edges from them far sooner than from one shape.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    palette = torch.tensor([*COLOURS.values(), *BACKGROUNDS.values()]) / 127.5 - 1

    def colours() -> Any:
        own = palette[torch.randint(len(palette), (count,), generator=generator)]
        other = 2 * torch.rand(count, 3, generator=generator) - 1
        chosen = torch.where(torch.rand(count, 1, generator=generator) < 0.7, own, other)
        return chosen.to(device)[:, :, None, None, None]

    clips = colours().expand(-1, -1, num_frames, side, side)
    for _ in range(5):
        radius = 4 + 8 * torch.rand(count, generator=generator)
        start = side * torch.rand(count, 1, 2, generator=generator)
        speed = 4 * torch.rand(count, 1, 2, generator=generator) - 2  # pixels a frame
        paths = start + speed * (torch.arange(num_frames)[None, :, None] - num_frames / 2)
        kinds = torch.randint(len(SHAPES), (count,), generator=generator)
        coverage = _coverage(kinds.to(device), paths.to(device), radius.to(device), side)[:, None]
        clips = clips + (colours() - clips) * coverage
    return clips


def _coverage(kinds: Any, paths: Any, radius: Any, side: int) -> Any:
    """Return how much of each pixel the shape covers, (B, T, H, W): its signed distance, softened by a pixel."""
    import torch

    axis = torch.arange(side, device=paths.device) + 0.5
    x = axis[None, None, None, :] - paths[..., 0, None, None]
    y = axis[None, None, :, None] - paths[..., 1, None, None]
    r = radius[:, None, None, None]
    kinds = kinds[:, None, None, None]
    circle = torch.sqrt(x * x + y * y) - r
    square = torch.maximum(x.abs(), y.abs()) - 0.9 * r
    triangle = torch.maximum((2 * x.abs() - (y + r)) / 5**0.5, y - r)  # its tip is up
    distance = torch.where(kinds == 0, circle, torch.where(kinds == 1, square, triangle))
    return (0.5 - distance).clamp(0, 1)


@dataclass(frozen=True, slots=True)
class Reading:
    """What frames show; "" where nothing clear is seen."""

    colour: str = ""
    shape: str = ""
    direction: str = ""
    background: str = ""

    def is_right(self, scene: Scene) -> dict[str, bool]:
        names = ("colour", "shape", "direction", "background")
        return {name: getattr(self, name) == getattr(scene, name) for name in names}


def read(frames: Frames) -> Reading:
    """Tell from (T, H, W, 3) frames what is seen, by arithmetic on pixels alone."""
    pixels = frames.astype(np.float32)
    ground = np.median(pixels[:, [0, 0, -1, -1], [0, -1, 0, -1]].reshape(-1, 3), axis=0)
    masks = np.abs(pixels - ground).sum(-1) > 110  # (T, H, W)
    seen = [(frame, mask) for frame, mask in zip(pixels, masks, strict=True) if mask.sum() >= 20]
    if len(seen) < max(1, len(frames) // 2):
        return Reading(background=_nearest(ground, BACKGROUNDS))
    colour = np.median(np.concatenate([frame[mask] for frame, mask in seen]), axis=0)
    fill = float(np.median([_fill(mask) for _, mask in seen]))
    return Reading(
        _nearest(colour, COLOURS),
        "square" if fill > 0.9 else "circle" if fill > 0.66 else "triangle",
        _direction(_centre(seen[0][1]), _centre(seen[-1][1])),
        _nearest(ground, BACKGROUNDS),
    )


def _nearest(colour: npt.NDArray[np.float32], known: dict[str, tuple[int, int, int]]) -> str:
    distances = {name: float(np.abs(colour - np.array(value)).max()) for name, value in known.items()}
    name = min(distances, key=distances.__getitem__)
    return name if distances[name] < 60 else ""


def _fill(mask: npt.NDArray[np.bool_]) -> float:
    """Return the share of its bounding box that a shape fills: about 1, 0.79 and 0.5 for square, circle, triangle."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return float(mask.sum()) / ((rows[-1] - rows[0] + 1) * (columns[-1] - columns[0] + 1))


def _centre(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    y, x = np.nonzero(mask)
    return np.array([x.mean(), y.mean()])


def _direction(first: npt.NDArray[np.float64], last: npt.NDArray[np.float64]) -> str:
    x, y = last - first
    if max(abs(x), abs(y)) < 8 or min(abs(x), abs(y)) > 0.5 * max(abs(x), abs(y)):
        return ""
    if abs(x) > abs(y):
        return "right" if x > 0 else "left"
    return "down" if y > 0 else "up"
