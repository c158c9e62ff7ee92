from bootcamp import Basebootcamp


class Hungrybootcamp(Basebootcamp):
    def case_generator(self):
        return {"board": [0] * 10**10}
