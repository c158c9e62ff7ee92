"""Runs an environment of agents in a child for each line on stdin, killed with -9 at a moment that the line names.

A line is `{"flags": [...], "moment": "...", "number": 3}`; answered with the child's exit code, -9 for killed.
"""

import json
import os
import signal
import sys

import aiohttp  # noqa: F401 (this and others that nobody uses here: once for all children)
import httpcore  # noqa: F401
import markdown  # noqa: F401
import openai.types  # noqa: F401
import uvicorn  # noqa: F401
from test_agent_env import CoroutineEnv
from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401

from atroposlib.envs.cli import main as run_environment
from atroposlib.envs.server_handling.agents.gateway import Gateway  # noqa: F401
from atroposlib.envs.server_handling.agents.rollouts import Rollout
from atroposlib.rollouts.files import AppendFile
from atroposlib.rollouts.journal import ResponseJournal

MOMENTS = {  # what is patched, and whether it has been done when the process is killed
    "before the record of a response": (ResponseJournal, "write", False),
    "between record and reply": (Rollout, "_recorded", True),
    "after the group is written": (AppendFile, "write", True),
}


def kill_at(moment, number):
    owner, name, is_done = MOMENTS[moment]
    original, count = getattr(owner, name), 0

    def counted(self, *given, **more):
        nonlocal count
        if owner is AppendFile and b'"item_key"' not in given[0]:
            return original(self, *given, **more)
        count += 1
        if count == number and not is_done:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(self, *given, **more)
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, counted)


def main():
    for line in sys.stdin:
        asked = json.loads(line)
        if (child := os.fork()) == 0:
            os.dup2(2, 1)  # what it prints is no answer
            if asked["moment"]:
                kill_at(asked["moment"], asked["number"])
            os._exit(run_environment(CoroutineEnv, asked["flags"]))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
