"""Three launches in one discovery that two test modules share.

`old` serves. `new`, of the next generation and with other weights of the model, has a shorter context and speaks https;
it gets nothing until it is told otherwise. `odd` makes other prompts.
"""

from __future__ import annotations

import secrets
import shutil
import signal
from pathlib import Path

from tests.openai.certificates import write_pair
from tests.server.generations.rolling_turns import KEY, Generation, Revision, wait_for

CONTEXT = 600  # tokens, of the new one
END_S = 60


class SharedGenerations:
    """`start` once, `end` once."""

    def __init__(self, folder: Path, model: Path) -> None:
        for name in ("new", "odd"):
            shutil.copytree(model, folder / f"tiny-{name}")
        (folder / "tiny-new" / "model.safetensors").write_bytes(b"other weights")
        (folder / "tiny-odd" / "chat_template.jinja").write_text("{{ messages }}")
        (folder / "key").write_text(KEY)
        key = {"BIREME_KEY": secrets.token_hex(32)}

        def launch(number: int, *settings: str, **more: object) -> Generation:
            pace = "workers.decode.engine_config.mocker.step_ms=1"
            shared = (f"--discovery={folder / 'shared'}", f"--generation={number}", f"--weight={int(number != 1)}")
            revision = Revision("recipes/mocker", (pace, *settings))
            return Generation(folder, revision, arguments=shared, environment=key, **more)  # type: ignore[arg-type]

        self.old = launch(0)
        other = f"model={folder / 'tiny-new'}"
        short = f"workers.decode.engine_config.max_seq_len={CONTEXT}"
        self.new = launch(1, other, short, pair=write_pair(folder / "tls", "new"))
        self.odd = launch(2, f"model={folder / 'tiny-odd'}", has_door=False)
        self.odd.ports["openai"] = 0  # without a frontend
        self._processes = [one.begin() for one in (self.old, self.new, self.odd)]

    def wait(self) -> None:
        """Return once all answer and the old one knows the new one's worker."""
        for one, process in zip((self.old, self.new, self.odd), self._processes, strict=True):
            one.wait(process)
        wait_for(lambda: self.old.door.status()["elsewhere"] == {"1": 1})

    def end(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGINT)
            process.terminate()  # the second one: at once
        for process in self._processes:
            process.wait(END_S)
