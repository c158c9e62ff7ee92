"""The datasets of a finished run: each entry of `export` in the config becomes one file, whole or not at all."""

import logging
from pathlib import Path

from atroposlib.launch.config import DatagenConfig, ExportConfig
from atroposlib.launch.model_checks import Model
from atroposlib.launch.sharing import rollout_folders

logger = logging.getLogger(__name__)


def export_all(config: DatagenConfig, model: Model) -> list[Path]:
    """Write every export anew from all rollouts of the run; the paths written."""
    return [path for entry in config.export if (path := _export(entry, config, model)) is not None]


def _export(entry: ExportConfig, config: DatagenConfig, model: Model) -> Path | None:
    """One dataset; None, with a warning, when no response was good enough: the rollouts are still there."""
    from atroposlib.data.report import NothingKept
    from atroposlib.data.sft import SftOptions, export_sft, simple_policy
    from atroposlib.data.steps import TargetStep, UniqueStep

    policy = simple_policy(above=entry.above_score, top_n=entry.top_n_per_problem)
    if entry.unique:
        score, *others = policy.steps
        policy = policy.model_copy(update={"steps": [score, UniqueStep(step="unique", per="problem"), *others]})
    if entry.rows:
        exact = TargetStep(step="target", count=entry.rows, allow_fewer=True)
        policy = policy.model_copy(update={"steps": [*policy.steps, exact]})
    options = SftOptions(format=entry.format, tokenizer=model.tokenizer, overwrite=True, by_item=True)
    output = Path(config.run_dir, entry.path)
    try:
        report = export_sft(rollout_folders(config), output, policy, options)
    except NothingKept as error:
        logger.warning("no dataset written: %s", error)
        return None
    if entry.rows and report.records < entry.rows:
        logger.warning("%s: %d rows were asked for, only %d are there", output, entry.rows, report.records)
    logger.info("dataset written: path=%s records=%d copies=%d", output, report.records, report.copies)
    return output
