"""Runs programs in the sandbox for a test that started this as an ordinary user: a line of JSON each way."""

import dataclasses
import json
import sys

from atroposlib.sandbox.programs import Limits
from atroposlib.sandbox.sandbox import Sandbox
from atroposlib.sandbox.workers import SandboxError


def answer(line: str) -> dict:
    request = json.loads(line)
    limits = Limits(**request.pop("limits", {}))
    try:
        outcome = dataclasses.asdict(Sandbox().run(**request, limits=limits))
    except SandboxError as error:
        return {"refused": str(error)}
    outcome["files"] = {name: content.decode("latin-1") for name, content in outcome["files"].items()}
    return {**outcome, "stdout": outcome["stdout"].decode("latin-1"), "stderr": outcome["stderr"].decode("latin-1")}


for line in sys.stdin:
    print(json.dumps(answer(line)), flush=True)
