"""The datasets of a finished run: each entry of `export` in the config becomes one file, whole or not at all."""

import logging
from pathlib import Path

from atroposlib.errors import LaunchError
from atroposlib.launch.config import DatagenConfig, ExportConfig
from atroposlib.launch.model_checks import Model
from atroposlib.launch.sharing import rollout_folders

logger = logging.getLogger(__name__)


def export_all(config: DatagenConfig, model: Model) -> list[Path]:
    """Write every export again from all rollouts of the run; the paths written.

    Raises:
        LaunchError: a dataset would be empty, said once the others are written; the rollouts are still there.
    """
    from atroposlib.data.report import NothingKept

    written: list[Path] = []
    empty: list[str] = []
    for entry in config.export:
        try:
            written.append(_export(entry, config, model))
        except NothingKept as error:
            above = f"above_score is {entry.above_score:g}"
            empty.append(f"{entry.path} would be empty: {error}; {above}: lower it and run the same command again")
    if empty:
        raise LaunchError("the run is complete, but " + "; ".join(empty))
    return written


def _export(entry: ExportConfig, config: DatagenConfig, model: Model) -> Path:
    """Write one dataset."""
    from atroposlib.data.policy import TargetStep, UniqueStep
    from atroposlib.data.sft import SftOptions, export_sft, simple_policy

    policy = simple_policy(above=entry.above_score, top_n=entry.top_n_per_problem)
    if entry.unique:
        score, *others = policy.steps
        policy = policy.model_copy(update={"steps": [score, UniqueStep(step="unique", per="problem"), *others]})
    if entry.rows:
        exact = TargetStep(step="target", count=entry.rows, allow_fewer=True)
        policy = policy.model_copy(update={"steps": [*policy.steps, exact]})
    options = SftOptions(format=entry.format, tokenizer=model.tokenizer, overwrite=True, by_item=True)
    output = Path(config.run_dir, entry.path)
    report = export_sft(rollout_folders(config), output, policy, options)
    if entry.rows and report.records < entry.rows:
        logger.warning("%s: %d rows were asked for, only %d are there", output, entry.rows, report.records)
    logger.info("dataset written: path=%s records=%d copies=%d", output, report.records, report.copies)
    return output
