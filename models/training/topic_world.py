"""The world of tiny-embedding: sentences that mean a subject and what it does, in many wordings, by topics.

Subjects and actions are sets of words that mean the same. A meaning is one of each; its identity decides by hash
whether it is held out, so no held-out meaning was ever seen in training, in any wording.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

HELD_OUT_SHARE = 4  # one meaning in so many is held out

# topic -> subjects, actions; each is a set of wordings
TOPICS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "ships": (
        ("ship/vessel", "galley/trireme/bireme", "boat/dinghy", "sailor/seaman", "captain/skipper"),
        ("crosses the sea/sails over the ocean", "leaves the harbor/puts out from the port",
         "sinks in the storm/goes down in the gale", "drops the anchor/moors at the quay"),
    ),
    "weather": (
        ("rain/drizzle", "snow/sleet", "wind/breeze", "fog/mist", "thunder/lightning"),
        ("comes in the morning/arrives at dawn", "lasts all week/goes on for seven days",
         "covers the valley/lies over the hills", "ends before the evening/stops by nightfall"),
    ),
    "food": (
        ("bread/loaf", "soup/broth", "cake/pie", "cook/chef", "cheese/butter"),
        ("is served hot/comes warm to the table", "tastes of salt/has a salty taste",
         "is made in the kitchen/comes from the stove", "needs more sugar/is to be sweeter"),
    ),
    "music": (
        ("song/tune", "violin/fiddle", "singer/vocalist", "drum/tambourine", "choir/chorus"),
        ("is heard in the concert hall/sounds on the stage", "keeps the rhythm/follows the beat",
         "is out of tune/sounds false", "plays a melody softly/carries a quiet melody"),
    ),
    "animals": (
        ("dog/hound", "cat/kitten", "horse/pony", "bird/sparrow", "rabbit/hare"),
        ("sleeps in the straw/naps on the hay", "runs through the meadow/races over the grass",
         "feeds its young/brings food to its litter", "hides from the fox/flees from the wolf"),
    ),
    "money": (
        ("bank/lender", "merchant/trader", "customer/buyer", "tax/duty", "shop/store"),
        ("raises the price/makes it dearer", "pays in silver/gives coins for it",
         "keeps a record of debts/writes down what is owed", "lowers the interest/asks for a smaller rate"),
    ),
    "health": (
        ("doctor/physician", "nurse/carer", "patient/invalid", "medicine/drug", "fever/flu"),
        ("is at the hospital/stays in the clinic", "needs rest in bed/asks for days of rest",
         "eases the pain/makes it hurt less", "heals the wound/mends the injury"),
    ),
    "space": (
        ("star/sun", "planet/world", "comet/meteor", "rocket/spacecraft", "astronaut/cosmonaut"),
        ("circles in its orbit/goes round in space", "is seen through the telescope/shows in the lens",
         "shines in the night sky/glows among the constellations", "flies to the moon/travels to the lunar surface"),
    ),
    "school": (
        ("teacher/tutor", "pupil/student", "book/textbook", "lesson/class", "exam/test"),
        ("begins after the holidays/starts when the vacation is over", "explains the grammar/makes the grammar clear",
         "is about history/deals with the past", "is in the library/can be found in the reading room"),
    ),
    "sport": (
        ("team/squad", "runner/sprinter", "goalkeeper/goalie", "match/game", "coach/trainer"),
        ("wins the cup/takes the trophy", "loses in the final/is beaten in the last round",
         "is late for the kick-off/comes after the whistle", "trains in the stadium/practices on the pitch"),
    ),
}  # fmt: skip
FRAMES = ("The {} {}.", "They say that the {} {}.", "Look, a {} {}!", "I know that the {} {}.", "Which {} {}?")


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a sentence says, whatever its words."""

    topic: str
    subject: tuple[str, ...]
    action: tuple[str, ...]

    @property
    def is_held_out(self) -> bool:
        digest = hashlib.sha256(f"{self.subject[0]}|{self.action[0]}".encode()).digest()
        return digest[0] % HELD_OUT_SHARE == 0

    def say(self, rng: random.Random) -> str:
        return rng.choice(FRAMES).format(rng.choice(self.subject), rng.choice(self.action))

    def likeness(self, other: Meaning) -> float:
        """Return what the cosine of two sentences with these meanings should be."""
        if self.topic != other.topic:
            return 0.0
        return 0.4 + 0.3 * (self.subject == other.subject) + 0.3 * (self.action == other.action)


def meanings(held_out: bool) -> list[Meaning]:
    every = [
        Meaning(topic, tuple(subject.split("/")), tuple(action.split("/")))
        for topic, (subjects, actions) in TOPICS.items()
        for subject in subjects
        for action in actions
    ]
    return [meaning for meaning in every if meaning.is_held_out == held_out]
