import random

from internbootcamp.bootcamp import Basebootcamp


class Restlessbootcamp(Basebootcamp):
    def __init__(self):
        self.rng = random.SystemRandom()

    def case_generator(self):
        return {"number": self.rng.random()}

    def prompt_func(self, identity):
        return f"Is {identity['number']} nice?"

    @classmethod
    def _verify_correction(cls, solution, identity):
        return False
