"""Write the live figures' static pictures and first states into samkit/live, from their modules.

Run by ``make live`` after an edit of a figure; it needs Node. A test keeps what is stored in step.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

from samkit import live

PROGRAM = """
const answer = {};
for (const name of NAMES) {
  const { figure, picture } = await import(`./${name}.mjs`);
  answer[name] = { state: figure.state, picture: picture(figure) };
}
console.log(JSON.stringify(answer));
"""


def draw() -> dict[str, dict]:
    """For each figure, its first state and its picture as HTML."""
    with tempfile.TemporaryDirectory() as folder:
        for name in live.FIGURES:
            Path(folder, f"{name}.mjs").write_text(live.source(name), encoding="utf-8")
        program = Path(folder, "draw.mjs")
        program.write_text(PROGRAM.replace("NAMES", json.dumps(list(live.FIGURES))), encoding="utf-8")
        answer = subprocess.run(["node", program], capture_output=True, text=True, check=True)
    return json.loads(answer.stdout)


def files(drawn: dict[str, dict]) -> dict[str, str]:
    """The files that samkit/live should hold, by name."""
    states = {name: figure["state"] for name, figure in drawn.items()}
    pictures = {f"{name}.html": figure["picture"] + "\n" for name, figure in drawn.items()}
    return {"states.json": json.dumps(states, indent=2) + "\n"} | pictures


if __name__ == "__main__":
    for file, text in files(draw()).items():
        (Path(live.__file__).parent / file).write_text(text, encoding="utf-8")
        print(f"samkit/live/{file}: {len(text) / 1000:.0f} kB")
