from internbootcamp.bootcamp.base import Basebootcamp


class Guessesbootcamp(Basebootcamp):
    """The identity has only the key "data"; the constructor takes anything; verify_score takes few arguments."""

    def __init__(self, **kwargs):
        self.secret = kwargs.get("secret", 7)

    def case_generator(self):
        return {"data": self.secret}

    def prompt_func(self, identity):
        return f"Guess a number below {self.secret + 10}."

    def verify_score(self, output, identity):
        return float(output == str(identity["data"]))


class Helper:
    pass
