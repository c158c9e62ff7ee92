from bootcamp import Basebootcamp


class Hangswhilejudgingbootcamp(Basebootcamp):
    def case_generator(self):
        return {}

    def prompt_func(self, identity):
        return "Say anything."

    @classmethod
    def verify_score(cls, output, identity, **kwargs):
        return len(str(9**9**9))
