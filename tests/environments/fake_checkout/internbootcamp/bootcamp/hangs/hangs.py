from bootcamp import Basebootcamp


class Hangsbootcamp(Basebootcamp):
    def case_generator(self):
        while True:
            pass
