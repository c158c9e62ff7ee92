"""The report on environment files, on three small ones."""

import subprocess
import sys

from tests.compat.services import HERE

ENVIRONMENT = """
from atroposlib.envs.base import BaseEnv
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer

class SumsEnv(BaseEnv):
    async def setup(self):
        self.count = 0

    async def get_next_item(self):
        self.count += 1
        return {"n": self.count}

    async def collect_trajectories(self, item):
        chat = [{"role": "user", "content": f"What is {item['n']} + 1?"}]
        reply = await self.server.chat_completion(messages=chat, n=self.config.group_size, max_tokens=64)
        texts = [choice.message.content for choice in reply.choices]
        rows = [tokenize_for_trainer(self.tokenizer, [*chat, {"role": "assistant", "content": t}]) for t in texts]
        tokens, masks = [row["tokens"] for row in rows], [row["masks"] for row in rows]
        return {"tokens": tokens, "masks": masks, "scores": [float(i) for i in range(len(rows))]}, []
"""


def test_each_file_gets_its_verdict(tmp_path):
    folder = tmp_path / "environments"
    folder.mkdir()
    (folder / "sums.py").write_text(ENVIRONMENT)
    (folder / "lacking.py").write_text("import a_package_of_nobody\n" + ENVIRONMENT)
    (folder / "broken.py").write_text(ENVIRONMENT.replace("self.count = 0", "self.total = 0"))
    command = [sys.executable, str(HERE / "environment_files.py"), str(folder), "--markdown", str(tmp_path / "t.md")]
    done = subprocess.run([*command, "--logs", str(tmp_path / "logs")], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    rows = (tmp_path / "t.md").read_text().splitlines()[2:]
    assert rows[0] == "| runs | 1 | `sums` |"
    assert rows[1].startswith("| fails: ")
    assert rows[1].endswith(" | 1 | `broken` |")
    assert rows[2] == "| needs package a_package_of_nobody | 1 | `lacking` |"
