"""As tool_use_multiturn_server.py, with calls inside of thoughts: they run at once, and the thought continues.

python tool_use_interleaved_thinking.py process --env.total_steps 20 ...
"""

from typing import ClassVar

from atroposlib.environments.tool_use_multiturn_server import MultiTurnToolCallingEnv, ToolUseConfig
from atroposlib.envs.base import APIServerConfig, BaseEnvConfig


class InterleavedInlineEnv(MultiTurnToolCallingEnv):
    """Score 1 where all wishes are fulfilled, else 0; calls may stand inside of thoughts."""

    name = "tool_use_interleaved"
    system: ClassVar[str] = (
        "Do what the user asks with the tools. Think inside <think> and </think>; you may call tools there, and their "
        "results stand behind the calls in <tool_response>. When it is done, say so without a call."
    )

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        config, engine = super().config_init()
        return ToolUseConfig(**{**config.model_dump(exclude_unset=True), "interleaved_thinking": True}), engine


if __name__ == "__main__":
    InterleavedInlineEnv.cli()
