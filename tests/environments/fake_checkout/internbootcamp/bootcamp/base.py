class Basebootcamp:
    @classmethod
    def verify_score(
        cls, model_output, identity, format_score=0, short_penalty=False, short_threshold=256, format_penalty=False
    ):
        solution = cls.extract_output(model_output)
        if solution is None:
            return 0.0
        score = 1.0 if cls._verify_correction(solution, identity) else format_score
        return score * len(model_output) / short_threshold if short_penalty else score

    @staticmethod
    def extract_output(output):
        return output.partition("[answer]")[2].partition("[/answer]")[0] or None
