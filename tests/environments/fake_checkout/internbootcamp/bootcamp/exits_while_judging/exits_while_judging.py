import os

from bootcamp import Basebootcamp


class Exitswhilejudgingbootcamp(Basebootcamp):
    def case_generator(self):
        return {}

    def prompt_func(self, identity):
        return "Say anything."

    @classmethod
    def verify_score(cls, output, identity, **kwargs):
        os._exit(3)
