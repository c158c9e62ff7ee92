"""Flags that make SGLang faster for rollouts, where the user has not set them. Measured in README.md.

Decoding without a CUDA graph is several times slower, and SGLang takes graphs for fewer sequences than a rollout keeps
in flight; the HTTP log costs a line per request; text that nobody reads costs the detokenizer process.
"""

from collections.abc import Sequence

MOST_GRAPHS = 1024


def tuned_flags(given: Sequence[str], *, in_flight: int, one_gpu: bool, ids_only: bool) -> list[str]:
    """Flags to add to `given`.

    Args:
        in_flight: sequences generated at the same time.
        one_gpu: the model lies on one GPU. Only there graphs are asked for: memory that they need was not measured
            on others, so there SGLang's own choice stays.
        ids_only: replies carry token ids and no text; excludes stop strings, grammars and the /v1 routes.

    >>> tuned_flags(["--log-level-http", "info"], in_flight=300, one_gpu=True, ids_only=False)
    ['--cuda-graph-max-bs', '512']
    """
    graphs = min(MOST_GRAPHS, 1 << (in_flight - 1).bit_length())
    wanted = {
        "--log-level-http": ["warning"],
        **({"--cuda-graph-max-bs": [str(graphs)]} if one_gpu else {}),
        **({"--skip-tokenizer-init": []} if ids_only else {}),
    }
    names = {flag.partition("=")[0] for flag in given}
    if "--disable-cuda-graph" in names or "--cuda-graph-bs" in names:
        names.add("--cuda-graph-max-bs")
    return [part for name, values in wanted.items() if name not in names for part in (name, *values)]
