"""`view-run-multimodal`: the same browser; images held in messages or groups are shown next to the text."""

from atroposlib.cli.boundary import run
from atroposlib.cli.view_run import app


def main() -> None:
    run(app, "view-run-multimodal")


if __name__ == "__main__":
    main()
