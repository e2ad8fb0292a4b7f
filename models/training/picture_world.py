"""The world of tiny-vlm: pictures of coloured shapes on a 3 x 3 grid, and questions with one right answer.

Everything is drawn from a seeded generator. A scene (its objects, not how they are drawn) decides by hash
whether it belongs to training or to the held-out set, so no held-out scene was ever seen in training.

    for dialogue in dialogues(seed=1, count=1000, held_out=False): ...
"""

from __future__ import annotations

import hashlib
import io
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from PIL import Image, ImageDraw

HELD_OUT_SHARE = 20  # one scene in so many is held out
SHAPES = ("circle", "square", "triangle", "diamond", "cross", "star")
PALETTE = {
    "red": (220, 30, 30), "green": (30, 160, 50), "blue": (30, 70, 220), "yellow": (240, 215, 30),
    "purple": (130, 40, 160), "orange": (245, 135, 20), "black": (20, 20, 20), "pink": (250, 150, 200),
}  # fmt: skip
CELLS = ("top left", "top", "top right", "left", "centre", "right", "bottom left", "bottom", "bottom right")
MOST_OBJECTS = 6


@dataclass(frozen=True, slots=True, order=True)
class Thing:
    cell: int  # index into CELLS
    colour: str
    shape: str


Scene = tuple[Thing, ...]  # in the order of cells


@dataclass(slots=True)
class Turn:
    kind: str
    question: str
    answer: str


@dataclass(slots=True)
class Dialogue:
    """Pictures, then turns about them; `parts` is the first user message, a picture being its number."""

    scenes: list[Scene]
    turns: list[Turn]
    seed: int  # how the pictures are drawn
    parts: list[int | str] = field(default_factory=list)
    system: str = ""

    def pictures(self) -> list[Image.Image]:
        rng = random.Random(self.seed)
        return [draw(scene, rng) for scene in self.scenes]

    def messages(self, num_turns: int) -> list[dict[str, Any]]:
        """Return the conversation up to the question of turn `num_turns - 1`, pictures as {"type": "image"}."""
        messages: list[dict[str, Any]] = [{"role": "system", "content": self.system}] if self.system else []
        for number, turn in enumerate(self.turns[:num_turns]):
            content: Any = turn.question
            if number == 0 and self.scenes:
                content = [
                    {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "index": part}
                    for part in self.parts
                ]
            messages.append({"role": "user", "content": content})
            if number < num_turns - 1:
                messages.append({"role": "assistant", "content": turn.answer})
        return messages


def draw(scene: Scene, rng: random.Random) -> Image.Image:
    """Draw the things somewhere in their cells, in some size and tint, on a light ground."""
    width = rng.randint(84, 220)
    height = width if rng.random() < 0.6 else rng.randint(84, 220)
    ground = tuple(rng.randint(205, 255) for _ in range(3))
    picture = Image.new("RGB", (width, height), ground)
    pencil = ImageDraw.Draw(picture)
    for thing in scene:
        row, column = divmod(thing.cell, 3)
        radius = rng.uniform(0.27, 0.44)
        x = column + 0.5 + rng.uniform(-0.5, 0.5) * (0.98 - 2 * radius)
        y = row + 0.5 + rng.uniform(-0.5, 0.5) * (0.98 - 2 * radius)
        tint = tuple(max(0, min(255, channel + rng.randint(-12, 12))) for channel in PALETTE[thing.colour])
        _stamp(pencil, thing.shape, (x * width / 3, y * height / 3), (radius * width / 3, radius * height / 3), tint)
    return picture


def png(picture: Image.Image) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


_OUTLINES: dict[str, tuple[tuple[float, float], ...]] = {
    "square": ((-0.85, -0.85), (0.85, -0.85), (0.85, 0.85), (-0.85, 0.85)),
    "triangle": ((0, -1), (1, 0.85), (-1, 0.85)),
    "diamond": ((0, -1), (0.75, 0), (0, 1), (-0.75, 0)),
    "cross": (
        (-0.3, -1), (0.3, -1), (0.3, -0.3), (1, -0.3), (1, 0.3), (0.3, 0.3),
        (0.3, 1), (-0.3, 1), (-0.3, 0.3), (-1, 0.3), (-1, -0.3), (-0.3, -0.3),
    ),
    "star": (
        (0, -1), (0.24, -0.32), (0.95, -0.31), (0.38, 0.12), (0.59, 0.81),
        (0, 0.4), (-0.59, 0.81), (-0.38, 0.12), (-0.95, -0.31), (-0.24, -0.32),
    ),
}  # fmt: skip


def _stamp(
    pencil: ImageDraw.ImageDraw, shape: str, centre: tuple[float, float], radii: tuple[float, float], tint: Any
) -> None:
    (x, y), (rx, ry) = centre, radii
    if shape == "circle":
        pencil.ellipse((x - 0.92 * rx, y - 0.92 * ry, x + 0.92 * rx, y + 0.92 * ry), fill=tint)
    else:
        pencil.polygon([(x + dx * rx, y + dy * ry) for dx, dy in _OUTLINES[shape]], fill=tint)


def _scene(rng: random.Random) -> Scene:
    cells = rng.sample(range(9), rng.randint(1, MOST_OBJECTS))
    # few colours or few shapes now and then, so that counts of one kind go beyond one
    colours = rng.sample(sorted(PALETTE), rng.choice((1, 2, 3, 8, 8)))
    shapes = rng.sample(SHAPES, rng.choice((1, 2, 3, 6, 6)))
    return tuple(sorted(Thing(cell, rng.choice(colours), rng.choice(shapes)) for cell in cells))


def is_held_out(scene: Scene) -> bool:
    text = "|".join(f"{thing.cell}{thing.colour}{thing.shape}" for thing in scene)
    return hashlib.sha256(text.encode()).digest()[0] % HELD_OUT_SHARE == 0


def _scene_of_side(rng: random.Random, held_out: bool) -> Scene:
    while is_held_out(scene := _scene(rng)) != held_out:
        pass
    return scene


def _single(scene: Scene, key: Callable[[Thing], Any]) -> list[Thing]:
    """Return the things whose key nobody else in the scene has."""
    keys = [key(thing) for thing in scene]
    return [thing for thing in scene if keys.count(key(thing)) == 1]


def _colour(scene: Scene, rng: random.Random) -> Turn | None:
    if not (choice := _single(scene, lambda thing: thing.shape)):
        return None
    thing = rng.choice(choice)
    wording = rng.choice(("What colour is the {}?", "Which colour does the {} have?", "Colour of the {}?"))
    return Turn("colour", wording.format(thing.shape), thing.colour)


def _shape(scene: Scene, rng: random.Random) -> Turn | None:
    if not (choice := _single(scene, lambda thing: thing.colour)):
        return None
    thing = rng.choice(choice)
    wording = rng.choice(("What shape is {}?", "Which shape is {}?", "What is the {} object?"))
    return Turn("shape", wording.format(thing.colour), thing.shape)


def _position(scene: Scene, rng: random.Random) -> Turn | None:
    if not (choice := _single(scene, lambda thing: (thing.colour, thing.shape))):
        return None
    thing = rng.choice(choice)
    wording = rng.choice(("Where is the {} {}?", "In which place is the {} {}?"))
    return Turn("position", wording.format(thing.colour, thing.shape), CELLS[thing.cell])


def _at(scene: Scene, rng: random.Random) -> Turn | None:
    by_cell = {thing.cell: thing for thing in scene}
    cell = rng.choice(sorted(by_cell)) if rng.random() < 0.85 else rng.randrange(9)
    wording = rng.choice(("What is at the {}?", "What do you see at the {}?"))
    answer = f"a {by_cell[cell].colour} {by_cell[cell].shape}" if cell in by_cell else "nothing"
    return Turn("at", wording.format(CELLS[cell]), answer)


def _count(scene: Scene, rng: random.Random) -> Turn | None:
    kind = rng.randrange(4)
    if kind < 2:
        wording = rng.choice(("How many objects are there?", "How many objects do you see?", "Count the objects."))
        return Turn("count", wording, str(len(scene)))
    if kind == 2:
        colour = rng.choice(scene).colour if rng.random() < 0.75 else rng.choice(sorted(PALETTE))
        number = sum(thing.colour == colour for thing in scene)
        return Turn("count", f"How many {colour} objects are there?", str(number))
    shape = rng.choice(scene).shape if rng.random() < 0.75 else rng.choice(SHAPES)
    return Turn("count", f"How many {_plural(shape)} are there?", str(sum(thing.shape == shape for thing in scene)))


def _plural(shape: str) -> str:
    return shape + ("es" if shape == "cross" else "s")


def _describe(scene: Scene, rng: random.Random) -> Turn | None:
    wording = rng.choice(
        ("Describe the picture.", "What do you see?", "What is in the picture?", "Describe the image.")
    )
    named = [f"a {thing.colour} {thing.shape} at the {CELLS[thing.cell]}" for thing in scene]
    return Turn("describe", wording, ", ".join(named) + ".")


ABOUT_ONE: dict[str, Callable[[Scene, random.Random], Turn | None]] = {
    "colour": _colour, "shape": _shape, "position": _position, "at": _at, "count": _count, "describe": _describe,
}  # fmt: skip
_FACTS = {
    "What colour is the sky?": "blue", "What colour is grass?": "green", "What colour is coal?": "black",
    "What colour is a lemon?": "yellow", "What colour is blood?": "red", "How many sides has a square?": "4",
    "How many sides has a triangle?": "3", "How many legs has a dog?": "4", "How many days are in a week?": "7",
    "What sound does a cat make?": "meow", "What sound does a dog make?": "woof", "Hello!": "Hello!",
    "Who are you?": "I am tiny-vlm.", "What can you do?": "I name shapes in pictures.",
}  # fmt: skip
KINDS = (*ABOUT_ONE, "two", "fact")


def _two(scenes: list[Scene], rng: random.Random) -> Turn:
    """Ask about two pictures: which has more, or something about one of them."""
    first, second = len(scenes[0]), len(scenes[1])
    if rng.random() < 0.3 and first != second:
        return Turn("two", "Which picture has more objects?", "the first" if first > second else "the second")
    number = rng.randrange(2)
    turn = None
    while turn is None or turn.kind == "describe":
        turn = rng.choice(list(ABOUT_ONE.values()))(scenes[number], rng)
    name = ("first", "second")[number]
    return Turn("two", f"In the {name} picture: {turn.question[0].lower()}{turn.question[1:]}", turn.answer)


def _dialogue(rng: random.Random, held_out: bool, kind: str | None) -> Dialogue:
    roll = rng.random()
    if kind == "fact" or (kind is None and roll < 0.05):
        question = rng.choice(sorted(_FACTS))
        return Dialogue([], [Turn("fact", question, _FACTS[question])], 0, [question])
    if kind == "two" or (kind is None and roll < 0.25):
        scenes = [_scene_of_side(rng, held_out) for _ in range(2)]
        turns = [_two(scenes, rng) for _ in range(1 if kind else rng.randint(1, 4))]
        return _with_parts(Dialogue(scenes, turns, rng.getrandbits(32)), rng)
    while True:
        scene = _scene_of_side(rng, held_out)
        asked = [
            ABOUT_ONE[kind or rng.choice(list(ABOUT_ONE))](scene, rng) for _ in range(1 if kind else rng.randint(1, 6))
        ]
        if turns := [turn for turn in asked if turn is not None]:
            return _with_parts(Dialogue([scene], turns, rng.getrandbits(32)), rng)


def _with_parts(dialogue: Dialogue, rng: random.Random) -> Dialogue:
    """Write the first message: pictures before the question mostly, after it or between texts sometimes."""
    question = dialogue.turns[0].question
    if len(dialogue.scenes) == 2:
        dialogue.parts = rng.choice(([0, 1, question], ["First: ", 0, " Second: ", 1, " " + question]))
    else:
        dialogue.parts = rng.choice(([0, question], [0, question], [question, 0], ["Here is a picture: ", 0, question]))
    if rng.random() < 0.1:
        dialogue.system = "You are a helpful assistant."
    return dialogue


def dialogues(seed: int, count: int, held_out: bool, kind: str | None = None) -> Iterator[Dialogue]:
    """Yield conversations; with `kind`, of one turn each, about scenes of one side of the split."""
    rng = random.Random(f"{seed}-{kind}-{held_out}")
    for _ in range(count):
        yield _dialogue(rng, held_out, kind)
