"""A small checkout of InternBootcamp, laid out as the real one is: classes, each in a module of its own."""

from pathlib import Path

_BASE = '''
class Basebootcamp:
    """What the classes of a checkout inherit."""

    @classmethod
    def verify_score(cls, model_output, identity, format_score=0, short_penalty=True, short_threshold=100, **_):
        extracted = cls.extract_output(model_output)
        return 1.0 if cls._verify_correction(extracted, identity) else format_score
'''

_CLASS = '''
import random

from bootcamp import Basebootcamp


class {name}(Basebootcamp):
    """Right for about half of all answers, whatever they say: nobody solves anything here."""

    def case_generator(self):
        return {{"number": random.randint(1, 10**9), "of": "{name}"}}

    @staticmethod
    def prompt_func(question_case):
        return f"Is {{question_case['number']}} a {word} number? Answer in [answer] and [/answer]."

    @staticmethod
    def extract_output(output):
        return output

    @classmethod
    def _verify_correction(cls, solution, identity):
        return sum(solution.encode()) % 2 == identity["number"] % 2
'''

_BROKEN = "import a_package_that_nobody_has\n\n\nclass Brokenbootcamp:\n    pass\n"


def write_checkout(folder: Path) -> Path:
    """Three classes, one of which needs a package that nobody has; the folder."""
    package = folder / "internbootcamp" / "bootcamp"
    classes = {"Evenbootcamp": "even", "Primebootcamp": "prime"}
    modules = {name.lower(): _CLASS.format(name=name, word=word) for name, word in classes.items()}
    for module, text in {**modules, "brokenbootcamp": _BROKEN}.items():
        (package / module).mkdir(parents=True)
        (package / module / "__init__.py").touch()
        (package / module / f"{module}.py").write_text(text)
    (package / "base.py").write_text(_BASE)
    names = [*classes, "Brokenbootcamp"]
    lines = ["from .base import Basebootcamp", *(f"from .{n.lower()}.{n.lower()} import {n}" for n in names)]
    (package / "__init__.py").write_text("\n".join(lines) + "\n")
    (package.parent / "__init__.py").touch()
    return folder
