"""What several tests use: a live figure's module, run by Node as a browser would run it."""

from __future__ import annotations

import json
import subprocess

import pytest

from samkit import live


@pytest.fixture(scope="session")
def evaluate(tmp_path_factory):
    """Evaluate a JavaScript expression of a figure's module m, with some data."""
    folder = tmp_path_factory.mktemp("modules")

    def call(name, expression, data=None):
        module = folder / f"{name}.mjs"
        if not module.exists():
            module.write_text(live.source(name), encoding="utf-8")
        program = (
            f"import * as m from '{module.as_uri()}'; const data = {json.dumps(data)};"
            f"console.log(JSON.stringify({expression}, (_, v) => v === Infinity ? 'inf' : v))"
        )
        answer = subprocess.run(
            ["node", "--input-type=module", "-e", program], capture_output=True, text=True, check=False
        )
        assert answer.returncode == 0, answer.stderr
        return json.loads(answer.stdout)

    return call
