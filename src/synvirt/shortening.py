"""Messages in which no value is longer than a person reads. Callers send names, paths and texts of any length."""

# Longer than paths, URLs and public keys usually are; and longer than the end of a guest's console.
WORD_CHARS_MAX, MESSAGE_CHARS_MAX = 500, 3000
# What is left of a longer word: a path's end tells as much as its beginning.
_WORD_BEGIN, _WORD_END = 150, 50
LEFT_OUT = "…"


def shortened(message: str) -> str:
    """The message with «…» for the middle of each word that is longer than WORD_CHARS_MAX, and for its own middle, if what is
    left is longer than MESSAGE_CHARS_MAX: its beginning names the thing, its end says what is wrong."""
    if len(message) <= WORD_CHARS_MAX:
        return message
    import re  # a command without long messages does not need it

    message = re.sub(
        rf"\S{{{WORD_CHARS_MAX + 1},}}", lambda word: f"{word[0][:_WORD_BEGIN]}{LEFT_OUT}{word[0][-_WORD_END:]}", message
    )
    if len(message) <= MESSAGE_CHARS_MAX:
        return message
    kept = MESSAGE_CHARS_MAX // 2
    return f"{message[:kept]}{LEFT_OUT}{message[-kept + len(LEFT_OUT) :]}"
