"""Runs an environment of agents, or a gateway, in a child for each line, killed with -9 at a moment that it names.

A line is `{"flags": [...], "moment": "...", "number": 3, "say": "..."}`;
answered with the child's pid, and with its exit code when it has ended, -9 for killed.
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

from atroposlib.envs.agent_env import AgentEnv
from atroposlib.envs.cli import main as run_environment
from atroposlib.envs.server_handling import managed_server_proxy
from atroposlib.envs.server_handling.agents.gateway import Gateway  # noqa: F401
from atroposlib.envs.server_handling.agents.record import CallLog
from atroposlib.envs.server_handling.agents.rollouts import Rollout
from atroposlib.rollouts.files import AppendFile
from atroposlib.rollouts.journal import ResponseJournal

MOMENTS = {  # what is patched, and whether it has been done when the process is killed
    "before the record of a response": (ResponseJournal, "write", False),
    "between record and reply": (Rollout, "_recorded", True),
    "between the end of a rollout and its group": (AgentEnv, "_keep", True),
    "before the gateway's record": (CallLog, "append", False),
    "between the gateway's record and its reply": (CallLog, "append", True),
    "after the group is written": (AppendFile, "write", True),
}


class SayingEnv(CoroutineEnv):
    """Says what the line names; with its process, so that an agent asks other questions when it runs again."""

    say = ""

    async def run_agent(self, item, access):
        process = f" {os.getpid()}" if "process" in self.say else ""
        return await super().run_agent({"say": f"{item['say']} {self.say}{process}"}, access)

    async def verify(self, item, run):
        return float(len(run.answer))


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
            SayingEnv.say = asked["say"]
            if asked["moment"]:
                kill_at(asked["moment"], asked["number"])
            if asked["flags"][0] == "gateway":
                sys.argv = asked["flags"]
                managed_server_proxy.main()
                os._exit(0)
            os._exit(run_environment(SayingEnv, asked["flags"]))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
