"""Answers of platforms that have another form than theirs: a new release, a proxy in between, or an attack."""

from synvirt.errors import Internal


class OddAnswer(Internal):
    """`call` was answered with `what`, which names the field."""

    def __init__(self, where: str, call: str, what: str) -> None:
        super().__init__(
            f"{where} answers {call} with {what}"[:500],
            hint="does a proxy answer in its place? A release of the platform that is not known may do so, too",
        )
