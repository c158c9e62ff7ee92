"""Evaluation results as a table on standard output."""

from collections.abc import Mapping


def display_metrics_table(task_name: str, metrics: Mapping[str, float], start_time: float, end_time: float) -> None:
    """Print a markdown table of `metrics`, one row each, and how long the evaluation took.

    Names lose a leading `eval/`, and underscores become spaces. An arrow marks metrics where more is better.

    Args:
        task_name: shown in the first column.
        metrics: name -> value; numbers are printed with 4 decimals, anything else as it is.
        start_time: seconds since the epoch.
        end_time: seconds since the epoch.
    """
    rows = [("Task", "Metric", "", "Value")]
    for name, value in metrics.items():
        readable = name.removeprefix("eval/").replace("_", " ")
        direction = "↑" if "acc" in name or "correct" in name else ""
        rows.append((task_name, readable, direction, f"{value:.4f}" if isinstance(value, int | float) else str(value)))
    widths = [max(3, *(len(row[column]) for row in rows)) for column in range(4)]
    lines = [_line(row, widths) for row in rows]
    lines.insert(1, "|" + "|".join("-" * (width + 1) + end for width, end in zip(widths, "---:", strict=True)) + "|")
    print(f"\nEvaluation results: {task_name}", *lines, sep="\n")
    print(f"Evaluation took {end_time - start_time:.2f} s")


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    return "|" + "".join(f" {cell:{align}{width}} |" for cell, align, width in zip(cells, "<<<>", widths, strict=True))
