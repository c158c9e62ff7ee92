"""`atropos engine`: serve one model on this machine's CPU with SGLang's wire protocol."""

import logging
import os
from typing import Annotated

import typer

from atroposlib.cli.boundary import command, run

HELP = """Serve a model until SIGTERM or Ctrl-C. Prints one line when it is ready.

Examples:
  atropos engine
  atropos engine --model ~/models/qwen3-0.6b-q8_0.gguf --port 9010 --slots 8 --context 4096
"""

QUIET_OPENMP = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}
"""Threads wait asleep, after a moment's spinning: 32 sequences on two cores gave 163 and 176 tok/s without it, 193 and
220 with it; next to three busy processes 64 and 68, and 78 and 80. Ten times longer was slower there."""


def engine(
    model: Annotated[str, typer.Option(help="Model name (smollm2-135m) or path to a .gguf file.")] = "smollm2-135m",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 9004,
    slots: Annotated[int, typer.Option(min=1, max=256, help="Sequences computed at the same time.")] = 32,
    context: Annotated[int, typer.Option(min=64, help="Tokens per sequence, prompt and completion.")] = 1024,
    weights: Annotated[
        str | None, typer.Option(help="A .gguf file to take the weights from: the same model, trained on.")
    ] = None,
    weight_version: Annotated[str, typer.Option(help="What replies call these weights.")] = "default",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: all this process may use.")] = None,
    spin: Annotated[
        bool, typer.Option(help="Let idle threads spin: faster alone on a machine, far slower next to other work.")
    ] = False,
    exit_with_parent: Annotated[
        bool, typer.Option(help="End when the process that started this one has ended.")
    ] = False,
    insecure: Annotated[bool, typer.Option(help="Allow an address other than loopback; there is no login.")] = False,
) -> None:
    if not spin:  # OpenMP reads these when its library is loaded, which happens below
        for name, value in QUIET_OPENMP.items():
            os.environ.setdefault(name, value)
    from atroposlib_engine.serve import ServeOptions, serve

    serve(ServeOptions(model, host, port, slots, context, threads, exit_with_parent, insecure, weights, weight_version))


app = command(engine, HELP)


def main() -> None:
    run(app, "atropos engine", log_level=logging.INFO)


if __name__ == "__main__":
    main()
