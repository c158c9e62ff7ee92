"""An environment of the package verifiers (0.1) as an evaluation.

python environments/eval_environments/verifiers_eval.py --vf-env-name my-env --server-url http://localhost:9001/v1

The package and its environment are installed by you: `pip install 'verifiers<0.2' my-env`. It asks the engine itself,
so an evaluation that is killed starts again from its beginning.
"""

import argparse
import asyncio
import inspect
import json
from typing import Any

from atroposlib.envs.eval import EvalBase, eval_runner
from atroposlib.envs.server_handling.server_manager import ServerManager
from atroposlib.errors import ConfigError
from atroposlib.type_definitions import JsonObject


class VerifiersEval(EvalBase):
    """Mean reward of an environment of verifiers, share of rewards above 0, mean and share of each reward function."""

    def __init__(
        self,
        vf_env_name: str = "primeintellect/gsm8k",
        env_args: str | JsonObject = "{}",
        temperature: float = 0.0,
        max_tokens: int = 2048,
        max_eval_items: int = -1,
        max_concurrent: int = 64,
        **kwargs: Any,
    ) -> None:
        """
        Args:
            vf_env_name: what `verifiers.load_environment` takes.
            env_args: its arguments, as JSON or a mapping.
            max_tokens: of one reply.
            max_eval_items: -1: all.
            max_concurrent: rollouts at the same time.
            kwargs: see `EvalBase`.

        Raises:
            ConfigError: the package is not installed.
        """
        self.vf_env_name = vf_env_name
        self.env_args: JsonObject = json.loads(env_args) if isinstance(env_args, str) else env_args
        self.max_eval_items = max_eval_items
        settings = {"temperature": temperature, "max_tokens": max_tokens, "max_concurrent": max_concurrent}
        super().__init__(**settings, **kwargs)

    def setup_data(self) -> list[Any]:
        try:
            import verifiers  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise ConfigError("the package verifiers is missing; run: pip install 'verifiers<0.2'") from None
        self.vf_env = verifiers.load_environment(self.vf_env_name, **self.env_args)
        return list(self.vf_env.get_eval_dataset(n=self.max_eval_items))

    async def run_item(self, server: ServerManager, data_item: Any) -> tuple[dict[str, float], Any]:
        raise NotImplementedError("verifiers runs all items at once")

    async def _run_items(self, server_manager: ServerManager) -> list[tuple[dict[str, float], Any] | BaseException]:
        from openai import AsyncOpenAI

        config = server_manager.servers[0].config
        client = AsyncOpenAI(
            api_key=config.api_key or "none",
            base_url=config.base_url,
            timeout=config.timeout,
            # verifiers may ask from an event loop of its own, which ends before anyone could close connections in it
            default_headers={"Connection": "close"},
        )

        def evaluated() -> Any:
            return self.vf_env.evaluate(
                client=client,
                model=config.model_name,
                sampling_args={"temperature": self.temperature, "max_tokens": self.max_tokens},
                num_examples=self.max_eval_items,
                max_concurrent=self.max_concurrent,
            )

        is_async = inspect.iscoroutinefunction(self.vf_env.evaluate)  # it became one in 0.1.8
        async with client:
            made = await evaluated() if is_async else await asyncio.to_thread(evaluated)
        found: dict[str, Any] = made if isinstance(made, dict) else vars(made)
        return [self._outcome(found, number) for number in range(len(found["reward"]))]

    def _outcome(self, found: dict[str, Any], number: int) -> tuple[dict[str, float], Any]:
        reward = found["reward"][number]
        each = {name: values[number] for name, values in found["metrics"].items()}
        metrics = {"avg_score": reward, "accuracy": float(reward > 0)}
        metrics |= {f"{name}_avg": value for name, value in each.items()}
        metrics |= {f"{name}_correct_rate": float(value > 0) for name, value in each.items()}
        texts = {name: found[name][number] for name in ("prompt", "completion", "answer")}
        return metrics, {**texts, "score": reward, "metrics": each}


def main() -> None:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--vf-env-name", default="primeintellect/gsm8k")
    options.add_argument("--env-args", default="{}")
    options.add_argument("--temperature", type=float, default=0.0)
    options.add_argument("--max-tokens", type=int, default=2048)
    options.add_argument("--max-eval-items", type=int, default=-1)
    options.add_argument("--max-concurrent", type=int, default=64)
    options.add_argument("--eval-dir")
    given, rest = options.parse_known_args()
    asyncio.run(eval_runner(VerifiersEval(**vars(given)), rest))


if __name__ == "__main__":
    main()
