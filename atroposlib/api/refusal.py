"""A request that is understood and cannot be done."""

from atroposlib.errors import ApiError


class Refused(ApiError):
    """A request that cannot be done; `status` is the HTTP code, `code` names the reason for programs."""

    def __init__(self, status: int, sentence: str, code: str | None = None) -> None:
        super().__init__(sentence)
        self.status = status
        self.code = code
