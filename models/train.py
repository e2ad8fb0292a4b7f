"""Train the small sample models that tests and demo use, each in a synthetic world of `training/`.

    python models/train.py tiny-chat                    # on one H200: minutes; see --budget
    python models/train.py tiny-chat --budget cpu       # a worse model in about an hour of two cores
    python models/train.py tiny-video                   # needs the extra `video`
    python models/train.py tiny-vlm
    python models/train.py tiny-embedding               # on any machine: a minute
    python models/train.py tiny-chat/eagle3             # the head that drafts for tiny-chat: minutes of two cores

The trained folders are committed under models/, so nobody has to run this.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from training import train_chat, train_eagle, train_embedding, train_video, train_vlm

TRAINERS: dict[str, Any] = {
    "tiny-chat": train_chat, "tiny-video": train_video, "tiny-vlm": train_vlm, "tiny-embedding": train_embedding,
    "tiny-chat/eagle3": train_eagle,
}  # fmt: skip
CHECKOUT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=sorted(TRAINERS))
    parser.add_argument("--out", type=Path, help="default: models/<model>")
    parser.add_argument("--budget", choices=["h200", "cpu", "smoke"], default="h200")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    accuracy = TRAINERS[args.model].train(args.out or CHECKOUT / "models" / args.model, args.budget, args.seed)
    print(json.dumps({"model": args.model, "held_out_accuracy": accuracy}))


if __name__ == "__main__":
    main()
