"""Every error this package raises on purpose.

A flat family under `AtroposError`; each also subclasses the builtin a caller would expect. Messages say what
was found, what was expected and what to do. Commands print an `AtroposError` as one sentence and exit with its
`exit_code`: 2 where what they were given is wrong, 1 where anything else failed.

`RolloutFault` and its children are the failure classes of a rollout: they are counted apart and none of them
ever becomes a score.
"""


class AtroposError(Exception):
    """Base of all errors with a message meant for the user."""

    exit_code = 1


class ConfigError(AtroposError, ValueError):
    """A configuration value, flag or key is wrong."""

    exit_code = 2


class PathError(AtroposError, ValueError):
    """A path that was given cannot be used: unresolved `~` or `$VAR`, not there, or not writable."""

    exit_code = 2


class DiskError(PathError):
    """A file cannot be written or read although its path is right: a full disk, a limit, damage."""

    exit_code = 1


class GroupError(AtroposError, ValueError):
    """A scored group breaks an invariant (shape, mask, finite numbers)."""


class DataError(AtroposError, ValueError):
    """A rollout or dataset file is damaged; the message names file and line."""


class RowError(DataError):
    """One line or response cannot be used; whoever reads many sets it aside, see `data.set_aside`.

    `where` is `file:line` or `file:line[index]`, `reason` the few words that it is counted by; `text` says more.
    """

    def __init__(self, where: str, reason: str, text: str = "") -> None:
        super().__init__(f"{where}: {text or reason}")
        self.where, self.reason, self.text = where, reason, text or reason


class ApiError(AtroposError, RuntimeError):
    """The trajectory API refused a request, with this HTTP status, or did not answer in time (None)."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class LaunchError(AtroposError, RuntimeError):
    """A supervised run cannot start or resume."""


class ModelError(AtroposError, RuntimeError):
    """A model cannot be fetched, is corrupt, or does not fit its tokenizer."""


class RolloutFault(AtroposError):
    """Why a rollout has no score. `failure_class` names the counter it belongs to."""

    failure_class = "environment"


class RequestFault(RolloutFault, ValueError):
    """The engine refused the request (4xx): prompt too long, unknown parameter. Trying again will not help."""

    failure_class = "request"


class EngineFault(RolloutFault, ConnectionError):
    """The engine failed (5xx, reset, timeout). The same request may succeed later."""

    failure_class = "engine"


class KilledFault(RolloutFault, RuntimeError):
    """The rollout was aborted from outside: worker timeout, engine abort, shutdown."""

    failure_class = "kill"


class VerifierFault(RolloutFault, RuntimeError):
    """A verifier or reward function raised, timed out or ran out of memory."""

    failure_class = "verifier"


class EnvironmentFault(RolloutFault, RuntimeError):
    """The environment's own code failed."""

    failure_class = "environment"
