import random

from bootcamp import Basebootcamp


class Dividesbootcamp(Basebootcamp):
    """The identity is no JSON: a tuple, and a dict with numbers as keys."""

    def __init__(self, largest=100):
        self.largest = largest

    def case_generator(self):
        return {"pair": (random.randint(2, 9), random.randint(10, self.largest)), "names": {1: "a"}}

    @staticmethod
    def prompt_func(identity):
        return "Does {} divide {}? [answer]yes[/answer] or [answer]no[/answer]".format(*identity["pair"])

    @classmethod
    def _verify_correction(cls, solution, identity):
        small, large = identity["pair"]
        assert isinstance(identity["pair"], tuple)
        assert identity["names"][1] == "a"
        return (solution == "yes") == (large % small == 0)
