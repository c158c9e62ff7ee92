import os

from bootcamp import Basebootcamp

print("noise at import" * 1000)


class NoisybootCamp(Basebootcamp):
    def case_generator(self):
        os.write(1, b"\x00\xff" * 5000)
        return {"word": "quiet"}

    def prompt_func(self, identity):
        print(identity)
        return "Say quiet."

    @classmethod
    def _verify_correction(cls, solution, identity):
        print("=====DEBUG=====", solution)
        return solution == identity["word"]
